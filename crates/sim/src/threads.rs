//! Several threads at once on one file system, in an order that a seed decides, until the
//! power is cut: what each of them was promised must be there afterwards.
//!
//! Every name and every file belongs to one task, and tasks work in each other's directories,
//! so that their operations meet in buckets, inodes, batches and checkpoints while each task's
//! own history stays a simple list. After a crash
//!
//! 1. the entries of a task are those after some prefix of its operations, and that prefix
//!    contains every operation that a sync covered, its own or another task's;
//! 2. if an operation is there, so is every operation of any task that had returned before it
//!    was called;
//! 3. a file holds, sector by sector, what its owner wrote since the last sync that covered
//!    it, and at least what that sync covered.
//!
//! Besides, all tasks move a few directories into one another: whatever comes of that must be
//! one tree.

mod ledger;

use crate::explore::Failure;
use crate::run::guarded;
use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use base::sync::{Mutex, rank};
use base::{sched, thread};
use device::sim::Survival;
use fs::{Caller, FileSystem, Ino, OpenFile, ROOT, SetAttr};

use ledger::{Entries, Entry, History, Kind, Known, Ledger, Place, Span};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Directories that all tasks use.
const DIRS: usize = 3;
/// Directories that all tasks move into one another.
const JUGGLED: u64 = 4;
const MARK: &[u8] = b"user.mark";

/// What one run does, beside what its seed decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub seed: u64,
    pub tasks: usize,
    /// Power cuts.
    pub cycles: u64,
    /// Operations of each task between two cuts, at most.
    pub steps: u64,
}

impl Plan {
    pub fn new(seed: u64) -> Plan {
        Plan {
            seed,
            tasks: 3,
            cycles: 4,
            steps: 400,
        }
    }

    /// The command that runs it again.
    pub fn replay(&self) -> String {
        let Plan {
            seed,
            tasks,
            cycles,
            steps,
        } = self;
        format!(
            "cargo run -p sheaf-sim -- replay threads {seed} --tasks {tasks} --cycles {cycles} --steps {steps}"
        )
    }
}

/// What a run came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Times that one thread handed over to another.
    pub steps: u64,
    pub cuts: u64,
    /// Hash of all that the devices were asked and answered.
    pub trace: u64,
    /// Hashes of what the cuts left.
    pub states: Vec<u64>,
}

struct Task<'a> {
    me: usize,
    fs: &'a FileSystem,
    dirs: &'a [Ino],
    known: &'a Known,
    rng: Rng,
}

impl Task<'_> {
    fn ledger(&self) -> base::sync::MutexGuard<'_, Ledger> {
        self.known.ledgers[self.me].lock()
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
    /// on, since a crash may find it done before it returns.
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
        real()?;
        let mut ledger = self.ledger();
        ledger.pending = false;
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
        // before that leaves an entry that no state has; `unknown` allows it.
        let called = {
            let mut ledger = self.ledger();
            ledger.pending = false;
            self.known.tick()
        };
        let attr = match kind {
            Kind::File => self
                .fs
                .mknod(&who, dir, &place.1, libc::S_IFREG | 0o644, 0)?,
            Kind::Dir => self.fs.mkdir(&who, dir, &place.1, 0o755)?,
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
        let returned = self.known.tick();
        ledger.spans.push(Span { called, returned });
        let number = ledger.operations();
        ledger.touched.insert(attr.ino, number);
        if kind == Kind::File {
            let fresh = History {
                first: 0,
                versions: vec![Vec::new()],
                written: 0,
            };
            ledger.files.insert((attr.ino, attr.generation), fresh);
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
        let mut touched = vec![moved.ino];
        if let Some(target) = target {
            touched.push(target.ino);
            unlink(&mut next, &target);
        }
        next.remove(&from);
        next.insert(to.clone(), moved);
        let who = Caller::root();
        let (a, b) = (self.dirs[from.0], self.dirs[to.0]);
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
        self.change(next, &[ino], || {
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
        self.change(next, &[entry.ino], || match entry.kind {
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
                Err(error) if [libc::EINVAL, libc::ENOTEMPTY].contains(&error.errno()) => {
                    return Ok(());
                }
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
        let file = self.fs.open_file(entry.ino, libc::O_RDWR)?;
        let mut bytes = self.ledger().files[&id].newest().clone();
        let most = *self.rng.pick(&[100, 3000, 20_000, 60_000]);
        if self.rng.one_in(6) {
            let cut = self.rng.below(bytes.len() as u64 * 5 / 4 + 1) as usize;
            bytes.resize(cut, 0);
            self.version(id, bytes);
            self.known
                .note(|| format!("task {}: truncate {id:?} to {cut}", self.me));
            self.fs.truncate(&Caller::root(), entry.ino, cut as u64)?;
            self.wrote(id);
            return Ok(());
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
        self.version(id, bytes);
        self.known.note(|| {
            let end = offset + data.len();
            format!("task {}: write {id:?} at {offset} to {end}", self.me)
        });
        let mut done = 0;
        while done < data.len() {
            done += self
                .fs
                .write(&file, (offset + done) as u64, &data[done..])?;
        }
        self.wrote(id);
        if self.rng.one_in(3) {
            self.fsync(&file, &entry)?;
        }
        Ok(())
    }

    /// The write of the newest version has returned.
    fn wrote(&self, id: (Ino, u64)) {
        let mut ledger = self.ledger();
        let history = ledger.files.get_mut(&id).expect("files have content");
        history.written = history.number();
    }

    fn version(&self, id: (Ino, u64), bytes: Vec<u8>) {
        let mut ledger = self.ledger();
        let history = ledger.files.get_mut(&id).expect("files have content");
        history.versions.push(bytes);
    }

    fn fsync(&mut self, file: &OpenFile, entry: &Entry) -> Result<(), fs::Error> {
        let id = (entry.ino, entry.generation);
        self.known
            .note(|| format!("task {}: fsync {id:?}", self.me));
        let data_only = self.rng.one_in(3);
        self.fs.fsync(file, data_only)?;
        let mut ledger = self.ledger();
        let history = ledger.files.get_mut(&id).expect("files have content");
        history.forget_before(history.number());
        if let (Some(operation), false) = (ledger.touched.get(&entry.ino).copied(), data_only) {
            ledger.durable(operation);
        }
        Ok(())
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
        let len = match self.fs.read(&file, 0, &mut bytes) {
            Err(error) if gone(&error) => return Ok(()),
            done => done?,
        };
        match self.fs.getattr(id.0) {
            // It was being deleted when it was opened, by number alone: what it held is going.
            Err(error) if gone(&error) => return Ok(()),
            other => other?,
        };
        let mut history = self.known.ledgers[whose].lock().files[&id].clone();
        // What was there when the read began, and all that came since.
        let mut versions = vec![before.newest().clone()];
        let since = before.number().saturating_sub(history.first);
        if before.versions.len() > 1 {
            versions.push(before.versions[before.versions.len() - 2].clone());
        }
        versions.extend(history.versions.drain(since.min(history.versions.len())..));
        history.versions = versions;
        if whose == self.me {
            assert!(
                bytes[..len] == **history.newest(),
                "task {whose} reads its file {id:?}"
            );
        } else if let Err(what) = history.allows(&bytes[..len]) {
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

    fn step(&mut self) -> Result<(), fs::Error> {
        let what = self.rng.below(52);
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
                let file = self.fs.open_file(entry.ino, libc::O_RDWR)?;
                self.fsync(&file, &entry)
            }
            36 => {
                let covered = self.known.covered();
                self.fs.sync()?;
                self.known.cover(covered);
                Ok(())
            }
            37 => Ok(self.fs.store().checkpoint()?),
            38..=41 => self.mark(),
            42..=43 => self.juggle(),
            44..=49 => self.jostle(),
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
        _ => "tick",
    }
}

fn mark(fs: &FileSystem, ino: Ino) -> Option<(usize, u32)> {
    match fs.getxattr(ino, MARK) {
        Ok(value) => Some((value.len(), format::checksum(0, &value))),
        Err(error) if error.errno() == libc::ENODATA => None,
        Err(error) => panic!("attribute of {ino}: {error}"),
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

/// The names in a directory, its own and its parent's aside.
fn names(fs: &FileSystem, dir: Ino) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let mut collect = |entry: &fs::DirEntry<'_>| {
        if !matches!(entry.name, b"." | b"..") {
            names.push(entry.name.to_vec());
        }
        true
    };
    fs.readdir(dir, 0, &mut |entry| collect(&entry)).unwrap();
    names
}

/// The entries in the common directories, by the task whose they are.
fn look(fs: &FileSystem, dirs: &[Ino], tasks: usize) -> Vec<Entries> {
    let mut found = vec![Entries::new(); tasks];
    for (number, dir) in dirs.iter().enumerate() {
        // Those that begin with a dot are nobody's.
        for name in names(fs, *dir).into_iter().filter(|n| n[0] != b'.') {
            let attr = fs.lookup(*dir, &name).unwrap();
            let owner = (name[0] - b'0') as usize;
            let kind = match attr.mode & libc::S_IFMT {
                libc::S_IFDIR => Kind::Dir,
                _ => Kind::File,
            };
            let entry = Entry {
                ino: attr.ino,
                generation: attr.generation,
                kind,
                mode: attr.mode & 0o7777,
                links: attr.nlink,
                mark: mark(fs, attr.ino),
            };
            found[owner].insert((number, name), entry);
        }
    }
    found
}

/// Whether `found` is `state` with what a create that had not returned may have added.
fn matches(state: &Entries, found: &Entries, newest: bool) -> bool {
    if state == found {
        return true;
    }
    let mut rest = found.clone();
    rest.retain(|place, entry| state.get(place) != Some(entry));
    newest && found.len() == state.len() + 1 && rest.len() == 1
}

/// Checks what a crash left and returns it as the new beginning.
fn check(fs: &FileSystem, dirs: &[Ino], mut known: Known) -> Known {
    let found = look(fs, dirs, known.ledgers.len());
    let mut prefixes = Vec::new();
    for (task, (ledger, found)) in known.ledgers.iter().zip(&found).enumerate() {
        let ledger = ledger.lock();
        let last = ledger.states.len() - 1;
        let fits = |i: &usize| matches(&ledger.states[*i], found, *i == last);
        let fitting: Vec<usize> = (0..=last).filter(fits).collect();
        let (Some(first), Some(last)) = (fitting.first(), fitting.last()) else {
            panic!(
                "task {task}: no prefix of operations {} to {} gives {found:#?}\nnewest {:#?}\noldest {:#?}",
                ledger.before,
                ledger.operations(),
                ledger.now(),
                ledger.states[0],
            );
        };
        prefixes.push((ledger.spans[*first].called, *last));
    }
    for (task, ledger) in known.ledgers.iter().enumerate() {
        let ledger = ledger.lock();
        let (_, last) = prefixes[task];
        for (other, (called, _)) in prefixes.iter().enumerate() {
            if let Some(missing) = ledger.spans[last + 1..]
                .iter()
                .find(|s| s.returned < *called)
            {
                panic!(
                    "task {task} lost an operation ({missing:?}) that returned before one of task {other} was called at {called}"
                );
            }
        }
    }
    let ledgers = found
        .into_iter()
        .zip(std::mem::take(&mut known.ledgers))
        .map(|(entries, old)| {
            let old = old.into_inner();
            let mut ledger = Ledger::new(entries.clone());
            for entry in entries.values().filter(|e| e.kind == Kind::File) {
                let id = (entry.ino, entry.generation);
                let bytes = content(fs, entry.ino);
                let allowed = match old.files.get(&id) {
                    Some(history) => history.allows(&bytes),
                    // Created by a call that had not returned.
                    None if bytes.is_empty() => Ok(()),
                    None => Err("a file nobody wrote has bytes".to_owned()),
                };
                if let Err(what) = allowed {
                    panic!("file {id:?}: {what}");
                }
                ledger.files.insert(
                    id,
                    History {
                        first: 0,
                        versions: vec![bytes],
                        written: 0,
                    },
                );
            }
            Mutex::new(rank::LEAF, ledger)
        });
    Known {
        moment: AtomicU64::new(0),
        ledgers: ledgers.collect(),
        ..known
    }
}

fn content(fs: &FileSystem, ino: Ino) -> Vec<u8> {
    let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
    let mut bytes = vec![0; fs.getattr(ino).unwrap().size as usize + 1];
    let len = fs.read(&file, 0, &mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

/// The array and the options that a seed asks for.
fn shape(rng: &mut Rng) -> Shape {
    let mut shape = Shape::small(rng.range(1, 4));
    if rng.one_in(3) {
        // Batches of one length, so that old ones lie where new ones end.
        shape.logical_block = 4096;
    }
    let store = &mut shape.options.store;
    store.background = true;
    store.workers = rng.range(1, 4) as usize;
    store.shards = rng.range(1, 5) as usize;
    store.dirty_bytes = Some(*rng.pick(&[32 << 10, 256 << 10, 4 << 20]));
    store.node_cache_bytes = *rng.pick(&[64 << 10, 16 << 20]);
    shape.options.data.cache_bytes = *rng.pick(&[256 << 10, 8 << 20]);
    if rng.one_in(2) {
        // Few hashes: buckets split late, and names collide.
        shape.options.hash_mask = Some(0xF << 60);
    }
    shape
}

/// Makes the directories that all tasks use.
fn set_up(fs: &FileSystem, known: &mut Known) -> Result<Vec<Ino>, fs::Error> {
    let who = Caller::root();
    for i in 0..JUGGLED {
        let name = format!("j{i}");
        let made = fs.mkdir(&who, ROOT, name.as_bytes(), 0o755)?;
        known.juggled.push(made.ino);
    }
    let make = |i| {
        let name = format!("dir{i}");
        Ok(fs.mkdir(&who, ROOT, name.as_bytes(), 0o755)?.ino)
    };
    let dirs = (0..DIRS).map(make).collect();
    fs.sync()?;
    dirs
}

/// When the power goes.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// After so many operations of the devices.
    After(u64),
    /// So many operations after a checkpoint record begins to be written, the one after so
    /// many others: that is when a checkpoint decides what counts.
    AtRecord(u64, u64),
}

/// Lets all tasks work until the power goes.
fn work(plan: &Plan, machine: &Machine, dirs: &[Ino], known: &Known, order: u64, cut: Cut) -> u64 {
    let what = format!("{} (order {order:#x})", plan.replay());
    sched::run(&what, order, &machine.clock, || {
        let fs = machine.open().expect("the array opens");
        let switch = &machine.switch;
        match cut {
            Cut::After(operations) => switch.cut_after(operations),
            Cut::AtRecord(skip, after) => {
                let switch = Arc::clone(switch);
                let cut = move || switch.cut_after(after);
                machine.tap.interpose_at_label(skip, Box::new(cut));
            }
        }
        thread::parallel(plan.tasks, |me| {
            let mut task = Task {
                me,
                fs: &fs,
                dirs,
                known,
                rng: Rng::new(order ^ (me as u64 + 1)),
            };
            for _ in 0..plan.steps {
                if let Err(error) = task.step() {
                    assert!(switch.is_cut(), "task {me}: {error}");
                    return;
                }
            }
        });
        switch.cut_now();
        assert!(fs.close().is_err(), "a file system closes without power");
        sched::steps()
    })
}

/// Runs a plan; with `trail`, a failure lists what the tasks did since the last cut.
pub fn run(plan: &Plan, trail: bool) -> Result<Outcome, Failure> {
    let mut outcome = Outcome::default();
    let trail = trail.then(|| Arc::new(Mutex::new(rank::LEAF, Vec::new())));
    let done = guarded(|| {
        attempt(plan, trail.clone(), &mut outcome).map_err(|what| Failure {
            what,
            trail: Vec::new(),
        })
    });
    match done {
        Ok(()) => Ok(outcome),
        Err(failure) => Err(Failure {
            trail: trail.map_or_else(Vec::new, |trail| trail.lock().clone()),
            ..failure
        }),
    }
}

fn attempt(
    plan: &Plan,
    trail: Option<Arc<Mutex<Vec<String>>>>,
    outcome: &mut Outcome,
) -> Result<(), String> {
    let mut rng = Rng::new(plan.seed);
    let shape = shape(&mut rng);
    let mut machine = Machine::new(&Image::format(&shape)?, plan.seed);
    let ledger = || Mutex::new(rank::LEAF, Ledger::new(Entries::new()));
    let mut known = Known {
        moment: AtomicU64::new(0),
        trail,
        names: *rng.pick(&[8, 40]),
        name_len: *rng.pick(&[1, 180]),
        mark_max: *rng.pick(&[100, 30_000]),
        juggled: Vec::new(),
        ledgers: (0..plan.tasks).map(|_| ledger()).collect(),
    };
    let setting_up = |machine: &Machine, known: &mut Known| {
        sched::run("set-up", 1, &machine.clock, || {
            let fs = machine.open()?;
            let dirs = set_up(&fs, known)?;
            fs.close()?;
            Ok::<_, fs::Error>(dirs)
        })
    };
    let dirs = setting_up(&machine, &mut known).map_err(|e| e.to_string())?;
    for _ in 0..plan.cycles {
        let most = *rng.pick(&[50, 400, 2500]);
        let cut = match rng.one_in(2) {
            true => Cut::After(rng.below(most)),
            false => Cut::AtRecord(rng.below(8), rng.below(8)),
        };
        let order = rng.next_u64();
        if let Some(trail) = &known.trail {
            trail.lock().clear();
        }
        outcome.steps += work(plan, &machine, &dirs, &known, order, cut);
        outcome.cuts += 1;
        for device in &machine.devices {
            outcome.trace = outcome.trace.rotate_left(1) ^ device.trace_hash();
        }
        let survival = *rng.pick(&Survival::ALL);
        let now_ns = machine.now_ns();
        let crashed = machine.cut(survival, &mut rng);
        outcome.states.push(crashed.hash);
        machine = Machine::after(&shape, crashed, now_ns);
        machine.fsck()?;
        let settled = sched::run("recovery", order, &machine.clock, || {
            let fs = machine.open().map_err(|e| format!("recovery: {e}"))?;
            let known = check(&fs, &dirs, known);
            fs.close().map_err(|e| format!("close: {e}"))?;
            Ok::<_, String>(known)
        });
        known = settled?;
        machine.fsck()?;
    }
    Ok(())
}

/// The smallest plan found that fails as this one does, at all: fewer cuts, operations, tasks.
pub fn shrink(plan: &Plan) -> Plan {
    let mut smallest = *plan;
    let fails = |plan: &Plan| run(plan, false).is_err();
    for cycles in 1..plan.cycles {
        let fewer = Plan { cycles, ..smallest };
        if fails(&fewer) {
            smallest = fewer;
            break;
        }
    }
    for tasks in 1..plan.tasks {
        let fewer = Plan { tasks, ..smallest };
        if fails(&fewer) {
            smallest = fewer;
            break;
        }
    }
    let (mut passes, mut steps) = (0, smallest.steps);
    while passes + 1 < steps {
        let middle = passes.midpoint(steps);
        if fails(&Plan {
            steps: middle,
            ..smallest
        }) {
            steps = middle;
        } else {
            passes = middle;
        }
    }
    Plan { steps, ..smallest }
}

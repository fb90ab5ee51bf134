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

#[path = "names/world.rs"]
mod world;

use base::rng::Rng;
use base::sync::{Mutex, rank};
use base::{sched, thread};
use fs::{Caller, FileSystem, Ino, OpenFile, ROOT, SetAttr};
use std::collections::BTreeMap;

use std::sync::atomic::{AtomicU64, Ordering};
use world::World;

const SECTOR: usize = 512;
/// Directories that all tasks use.
const DIRS: usize = 3;

/// Where an entry is: the number of a common directory, and a name in it.
type Place = (usize, Vec<u8>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    File,
    Dir,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    ino: Ino,
    generation: u64,
    kind: Kind,
    mode: u32,
    links: u32,
}

type Entries = BTreeMap<Place, Entry>;

/// What a file may hold: its versions since the one that is surely there.
#[derive(Clone, Debug, Default)]
struct History {
    first: usize,
    versions: Vec<Vec<u8>>,
}

impl History {
    fn number(&self) -> usize {
        self.first + self.versions.len() - 1
    }

    fn newest(&self) -> &Vec<u8> {
        self.versions.last().expect("a file has a version")
    }

    fn forget_before(&mut self, number: usize) {
        let drop = number
            .saturating_sub(self.first)
            .min(self.versions.len() - 1);
        self.versions.drain(..drop);
        self.first += drop;
    }

    fn allows(&self, found: &[u8]) -> Result<(), String> {
        let sizes = || self.versions.iter().map(Vec::len);
        let (least, most) = (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0));
        if !(least..=most).contains(&found.len()) {
            return Err(format!("{} bytes, not {least} to {most}", found.len()));
        }
        for (i, sector) in found.chunks(SECTOR).enumerate() {
            let fits = |version: &Vec<u8>| {
                let at = i * SECTOR;
                (0..sector.len()).all(|j| sector[j] == version.get(at + j).copied().unwrap_or(0))
            };
            if !self.versions.iter().any(fits) {
                return Err(format!("sector {i} holds what was never written there"));
            }
        }
        Ok(())
    }
}

/// An operation on names and attributes, by the order of calls and returns.
#[derive(Clone, Copy, Debug)]
struct Span {
    called: u64,
    returned: u64,
}

/// What is known of one task's work.
#[derive(Debug, Default)]
struct Ledger {
    /// Entries after each operation since the newest that is surely durable, which is first.
    states: Vec<Entries>,
    /// When each of these operations ran; that of the first is not asked for.
    spans: Vec<Span>,
    /// Operations before the first of `states`.
    before: usize,
    files: BTreeMap<(Ino, u64), History>,
    /// The last operation on each inode.
    touched: BTreeMap<Ino, usize>,
    /// An operation was called and has not returned.
    pending: bool,
}

impl Ledger {
    fn new(entries: Entries) -> Ledger {
        Ledger {
            states: vec![entries],
            spans: vec![Span {
                called: 0,
                returned: 0,
            }],
            ..Ledger::default()
        }
    }

    fn now(&self) -> &Entries {
        self.states.last().expect("there is a state")
    }

    fn operations(&self) -> usize {
        self.before + self.states.len() - 1
    }

    fn durable(&mut self, operations: usize) {
        let drop = operations.saturating_sub(self.before);
        self.states.drain(..drop);
        self.spans.drain(..drop);
        self.before += drop;
    }
}

/// Everything that is known, shared by the tasks.
struct Known {
    /// Counts calls and returns.
    moment: AtomicU64,
    ledgers: Vec<Mutex<Ledger>>,
}

impl Known {
    fn tick(&self) -> u64 {
        self.moment.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What a sync that is called now will cover: operations and versions by task.
    fn covered(&self) -> Vec<(usize, Vec<((Ino, u64), usize)>)> {
        let ledgers = self.ledgers.iter();
        ledgers
            .map(|ledger| {
                let ledger = ledger.lock();
                let files = ledger.files.iter();
                let versions = files.map(|(id, history)| (*id, history.number()));
                // The newest state may be one whose operation has not returned.
                let operations = ledger.operations() - usize::from(ledger.pending);
                (operations, versions.collect())
            })
            .collect()
    }

    fn cover(&self, covered: Vec<(usize, Vec<((Ino, u64), usize)>)>) {
        for (ledger, (operations, versions)) in self.ledgers.iter().zip(covered) {
            let mut ledger = ledger.lock();
            ledger.durable(operations);
            for (id, number) in versions {
                if let Some(history) = ledger.files.get_mut(&id) {
                    history.forget_before(number);
                }
            }
        }
    }
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
        let name = format!("{}-{}", self.me, self.rng.below(8));
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
            return self.fs.truncate(&Caller::root(), entry.ino, cut as u64);
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
        let mut done = 0;
        while done < data.len() {
            done += self
                .fs
                .write(&file, (offset + done) as u64, &data[done..])?;
        }
        if self.rng.one_in(3) {
            self.fsync(&file, &entry)?;
        }
        Ok(())
    }

    fn version(&self, id: (Ino, u64), bytes: Vec<u8>) {
        let mut ledger = self.ledger();
        let history = ledger.files.get_mut(&id).expect("files have content");
        history.versions.push(bytes);
    }

    fn fsync(&mut self, file: &OpenFile, entry: &Entry) -> Result<(), fs::Error> {
        let id = (entry.ino, entry.generation);
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
        let longest = before.versions.iter().map(Vec::len).max().unwrap_or(0);
        let mut bytes = vec![0; longest + 100_000];
        let len = match self.fs.read(&file, 0, &mut bytes) {
            Err(error) if gone(&error) => return Ok(()),
            done => done?,
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

    fn step(&mut self) -> Result<(), fs::Error> {
        match self.rng.below(40) {
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
            _ => self.fs.tick(),
        }
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

/// The entries in the common directories, by the task whose they are.
fn look(fs: &FileSystem, dirs: &[Ino], tasks: usize) -> Vec<Entries> {
    let mut found = vec![Entries::new(); tasks];
    for (number, dir) in dirs.iter().enumerate() {
        for (name, _) in world::list(fs, *dir, 50) {
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
fn check(fs: &FileSystem, dirs: &[Ino], known: Known, seed: u64) -> Known {
    let found = look(fs, dirs, known.ledgers.len());
    let mut prefixes = Vec::new();
    for (task, (ledger, found)) in known.ledgers.iter().zip(&found).enumerate() {
        let ledger = ledger.lock();
        let last = ledger.states.len() - 1;
        let fits = |i: &usize| matches(&ledger.states[*i], found, *i == last);
        let fitting: Vec<usize> = (0..=last).filter(fits).collect();
        let (Some(first), Some(last)) = (fitting.first(), fitting.last()) else {
            panic!(
                "seed {seed}: task {task}: no prefix of operations {} to {} gives {found:#?}\nnewest {:#?}\noldest {:#?}",
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
                    "seed {seed}: task {task} lost an operation ({missing:?}) that returned before one of task {other} was called at {called}"
                );
            }
        }
    }
    let ledgers = found.into_iter().zip(known.ledgers).map(|(entries, old)| {
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
                panic!("seed {seed}: file {id:?}: {what}");
            }
            ledger.files.insert(
                id,
                History {
                    first: 0,
                    versions: vec![bytes],
                },
            );
        }
        Mutex::new(rank::LEAF, ledger)
    });
    Known {
        moment: AtomicU64::new(0),
        ledgers: ledgers.collect(),
    }
}

fn content(fs: &FileSystem, ino: Ino) -> Vec<u8> {
    let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
    let mut bytes = vec![0; fs.getattr(ino).unwrap().size as usize + 1];
    let len = fs.read(&file, 0, &mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

fn run(seed: u64, tasks: usize, cycles: u64) -> u64 {
    let mut rng = Rng::new(seed);
    let mut world = World::new(2, 48 << 20, seed);
    let store = &mut world.options.store;
    store.background = true;
    store.workers = rng.range(1, 4) as usize;
    store.shards = rng.range(1, 5) as usize;
    store.dirty_bytes = Some(*rng.pick(&[32 << 10, 256 << 10, 4 << 20]));
    store.node_cache_bytes = *rng.pick(&[64 << 10, 16 << 20]);
    world.options.data.cache_bytes = *rng.pick(&[256 << 10, 8 << 20]);
    if rng.one_in(2) {
        world.options.hash_mask = Some(0xF << 60);
    }
    let clock = world.clock.clone();
    let fs = world.open();
    let who = Caller::root();
    let dirs: Vec<Ino> = (0..DIRS)
        .map(|i| {
            let name = format!("dir{i}");
            fs.mkdir(&who, ROOT, name.as_bytes(), 0o755).unwrap().ino
        })
        .collect();
    fs.close().unwrap();
    drop(fs);
    world.devices = world.devices.iter().map(|d| d.reopen()).collect();
    let ledger = || Mutex::new(rank::LEAF, Ledger::new(Entries::new()));
    let mut known = Known {
        moment: AtomicU64::new(0),
        ledgers: (0..tasks).map(|_| ledger()).collect(),
    };
    let mut steps = 0;
    for _ in 0..cycles {
        let most = *rng.pick(&[50, 400, 2500]);
        let cut = rng.below(most);
        let order = rng.next_u64();
        steps += sched::run(order, &clock, || {
            let fs = world.open();
            world.switch.cut_after(world.switch.operations() + cut);
            thread::parallel(tasks, |me| {
                let mut task = Task {
                    me,
                    fs: &fs,
                    dirs: &dirs,
                    known: &known,
                    rng: Rng::new(order ^ (me as u64 + 1)),
                };
                for _ in 0..400 {
                    if let Err(error) = task.step() {
                        assert!(world.switch.is_cut(), "seed {seed}: {error}");
                        return;
                    }
                }
            });
            world.switch.cut_now();
            let closed = fs.close();
            assert!(closed.is_err());
            sched::steps()
        });
        world.restart(&mut rng);
        let fs = world.open();
        known = check(&fs, &dirs, known, seed);
        let fs = world.remount(fs);
        fs.close().unwrap();
        drop(fs);
        world.devices = world.devices.iter().map(|d| d.reopen()).collect();
    }
    steps
}

#[test]
fn threads_in_any_order_leave_what_each_was_promised() {
    // SHEAF_SEEDS=100-200 runs others, SHEAF_CANARY=name a deliberate breakage.
    let canary = std::env::var("SHEAF_CANARY").ok();
    base::canary::plant(canary.and_then(|name| base::canary::Canary::from_name(&name)));
    let range = std::env::var("SHEAF_SEEDS").unwrap_or("1-3".into());
    let (first, last) = range.split_once('-').unwrap_or((&range, &range));
    for seed in first.parse().unwrap()..=last.parse().unwrap() {
        let steps = run(seed, 3, 4);
        eprintln!("seed {seed}: {steps} steps");
    }
}

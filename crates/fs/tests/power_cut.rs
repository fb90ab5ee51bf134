//! A file system loses power at random moments, again and again.
//!
//! What must hold afterwards: the names, links, modes and attributes are those after some
//! prefix of the operations, one that contains everything synced; a file that was synced has
//! at least that content; every part of a file is what some write since then made it.

#[path = "names/tree.rs"]
mod tree;
#[path = "names/world.rs"]
mod world;

use base::rng::Rng;
use fs::{Caller, FileSystem, Ino, OpenFile, ROOT, SetAttr};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tree::{Kind, Model};
use world::{World, list};

const SECTOR: usize = 512;
const MARK: &[u8] = b"user.mark";

/// What an inode is besides its names: permission bits and the marking attribute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Marks {
    /// Tells uses of one inode number apart.
    generation: u64,
    mode: u32,
    mark: Option<Vec<u8>>,
}

/// Everything that changes by one record at a time.
#[derive(Clone, Debug)]
struct Snapshot {
    tree: Model,
    marks: BTreeMap<Ino, Marks>,
}

/// What a file held since it was last durable: the oldest possible content first.
#[derive(Clone, Debug, Default)]
struct History {
    /// Number of the first version.
    first: usize,
    versions: Vec<Vec<u8>>,
}

impl History {
    fn newest(&self) -> &Vec<u8> {
        self.versions.last().expect("a file has some content")
    }

    fn number(&self) -> usize {
        self.first + self.versions.len() - 1
    }

    fn forget_before(&mut self, number: usize) {
        let drop = number.saturating_sub(self.first);
        self.versions.drain(..drop);
        self.first += drop;
    }

    /// Whether a crash may leave this content.
    fn allows(&self, found: &[u8]) -> Result<(), String> {
        let sizes = self.versions.iter().map(Vec::len);
        let (least, most) = (sizes.clone().min().unwrap_or(0), sizes.max().unwrap_or(0));
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

/// An inode number and the generation of its use.
type FileId = (Ino, u64);

/// After this many operations, the file has at least that version.
struct Barrier {
    operations: usize,
    file: FileId,
    version: usize,
}

struct Oracle {
    /// After each operation since the newest that is known durable; that one is first.
    states: Vec<Snapshot>,
    /// Operations before the first of `states`.
    before: usize,
    contents: BTreeMap<FileId, History>,
    /// The last operation on each inode's attributes and names.
    touched: BTreeMap<Ino, usize>,
    barriers: Vec<Barrier>,
}

impl Oracle {
    fn new(fs: &FileSystem) -> Oracle {
        let marks = BTreeMap::from([(ROOT, marks(fs, ROOT))]);
        let tree = Model::new();
        Oracle {
            states: vec![Snapshot { tree, marks }],
            before: 0,
            contents: BTreeMap::new(),
            touched: BTreeMap::new(),
            barriers: Vec::new(),
        }
    }

    fn now(&self) -> &Snapshot {
        self.states.last().expect("there is a state")
    }

    fn operations(&self) -> usize {
        self.before + self.states.len() - 1
    }

    fn push(&mut self, state: Snapshot, touched: &[Ino]) {
        self.states.push(state);
        let number = self.operations();
        for ino in touched {
            self.touched.insert(*ino, number);
        }
    }

    fn id(&self, ino: Ino) -> FileId {
        (ino, self.now().marks[&ino].generation)
    }

    fn durable(&mut self, operations: usize) {
        let drop = operations.saturating_sub(self.before);
        self.states.drain(..drop);
        self.before += drop;
    }

    fn synced(&mut self) {
        self.durable(self.operations());
        for history in self.contents.values_mut() {
            history.forget_before(history.number());
        }
    }

    fn fsynced(&mut self, ino: Ino) {
        let id = self.id(ino);
        if let Some(history) = self.contents.get_mut(&id) {
            history.forget_before(history.number());
        }
        if let Some(operation) = self.touched.get(&ino) {
            self.durable(*operation);
        }
    }

    fn files(&self) -> Vec<Ino> {
        let things = self.now().tree.things.iter();
        things
            .filter(|(_, t)| t.kind == Kind::File)
            .map(|(ino, _)| *ino)
            .collect()
    }
}

fn marks(fs: &FileSystem, ino: Ino) -> Marks {
    let attr = fs.getattr(ino).unwrap();
    Marks {
        generation: attr.generation,
        mode: attr.mode & 0o7777,
        mark: match fs.getxattr(ino, MARK) {
            Ok(value) => Some(value),
            Err(error) => {
                assert_eq!(error.errno(), libc::ENODATA, "{error}");
                None
            }
        },
    }
}

/// The names, links, modes and marks that there are.
fn look(fs: &FileSystem) -> Snapshot {
    let mut found = Snapshot {
        tree: Model::new(),
        marks: BTreeMap::new(),
    };
    let mut todo = vec![ROOT];
    found.marks.insert(ROOT, marks(fs, ROOT));
    found.tree.at(ROOT).nlink = fs.getattr(ROOT).unwrap().nlink;
    while let Some(dir) = todo.pop() {
        for (name, ino) in list(fs, dir, 50) {
            let attr = fs.lookup(dir, &name).unwrap();
            assert_eq!(attr.ino, ino);
            found.tree.at(dir).names.insert(name, ino);
            let kind = match attr.mode & libc::S_IFMT {
                libc::S_IFDIR => Kind::Dir,
                libc::S_IFLNK => Kind::Link,
                _ => Kind::File,
            };
            let mut thing = tree::thing(kind, dir);
            thing.nlink = attr.nlink;
            found.tree.things.insert(ino, thing);
            found.marks.insert(ino, marks(fs, ino));
            if kind == Kind::Dir {
                todo.push(ino);
            }
        }
    }
    found
}

fn same(a: &Snapshot, b: &Snapshot) -> bool {
    let shape = |s: &Snapshot| -> Vec<_> {
        let things = s.tree.things.iter();
        things
            .map(|(ino, t)| (*ino, t.kind, t.nlink, t.names.clone()))
            .collect()
    };
    a.marks == b.marks && shape(a) == shape(b)
}

fn content(fs: &FileSystem, ino: Ino) -> Vec<u8> {
    let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
    let mut bytes = vec![0; fs.getattr(ino).unwrap().size as usize + 1];
    let len = fs.read(&file, 0, &mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

/// Checks what a crash left, and makes it the oracle's new beginning.
fn check_and_settle(fs: &FileSystem, oracle: &mut Oracle, seed: u64) {
    let found = look(fs);
    let Some(at) = oracle.states.iter().rposition(|state| same(state, &found)) else {
        panic!(
            "seed {seed}: no prefix of operations {} to {} gives {found:#?}\nnewest {:#?}\noldest {:#?}",
            oracle.before,
            oracle.operations(),
            oracle.now(),
            oracle.states[0],
        );
    };
    let operations = oracle.before + at;
    for barrier in &oracle.barriers {
        if barrier.operations <= operations
            && let Some(history) = oracle.contents.get_mut(&barrier.file)
        {
            history.forget_before(barrier.version);
        }
    }
    let mut contents = BTreeMap::new();
    for (ino, thing) in &found.tree.things {
        if thing.kind != Kind::File {
            continue;
        }
        let bytes = content(fs, *ino);
        let id = (*ino, found.marks[ino].generation);
        if let Err(what) = oracle.contents[&id].allows(&bytes) {
            panic!("seed {seed}: file {ino} after operation {operations}: {what}");
        }
        let history = History {
            first: 0,
            versions: vec![bytes],
        };
        contents.insert(id, history);
    }
    let mut state = oracle.states[at].clone();
    // Parents are not part of the comparison, but of the model.
    for (ino, thing) in &found.tree.things {
        state.tree.at(*ino).parent = thing.parent;
    }
    *oracle = Oracle {
        states: vec![state],
        before: 0,
        contents,
        touched: BTreeMap::new(),
        barriers: Vec::new(),
    };
}

/// The machine in the middle of a run.
struct Run {
    fs: Arc<FileSystem>,
    oracle: Oracle,
    rng: Rng,
    open: BTreeMap<Ino, Arc<OpenFile>>,
    names: u64,
}

impl Run {
    fn name(&mut self) -> Vec<u8> {
        let i = self.rng.below(self.names);
        format!("{i}{}", "x".repeat((i * 53 % 180) as usize)).into_bytes()
    }

    fn dir(&mut self) -> Ino {
        let things = self.oracle.now().tree.things.iter();
        let dirs: Vec<Ino> = things
            .filter(|(_, t)| t.kind == Kind::Dir)
            .map(|(ino, _)| *ino)
            .collect();
        if self.rng.one_in(2) {
            ROOT
        } else {
            *self.rng.pick(&dirs)
        }
    }

    fn file(&mut self) -> Option<Ino> {
        let files = self.oracle.files();
        (!files.is_empty()).then(|| *self.rng.pick(&files))
    }

    /// A change of names: applied to a copy of the model, then to the file system. An
    /// operation that the power cut short may or may not have happened.
    fn names_change(
        &mut self,
        touched: &[Ino],
        model: impl FnOnce(&mut Model) -> tree::Outcome<()>,
        real: impl FnOnce(&FileSystem) -> Result<(), fs::Error>,
    ) -> Result<bool, fs::Error> {
        let mut next = self.oracle.now().clone();
        let expected = model(&mut next.tree);
        next.marks
            .retain(|ino, _| next.tree.things.contains_key(ino));
        if expected.is_ok() {
            self.oracle.push(next, touched);
        }
        match (real(&self.fs), expected) {
            (Ok(()), Ok(())) => Ok(true),
            (Err(error), Err(errno)) if error.errno() == errno => Ok(false),
            (Err(error), _) => Err(error),
            (Ok(()), Err(errno)) => panic!("succeeds where errno {errno} is due"),
        }
    }

    fn create(&mut self, kind: Kind) -> Result<(), fs::Error> {
        let (dir, name) = (self.dir(), self.name());
        if self.oracle.now().tree.find(dir, &name).is_some() {
            return Ok(());
        }
        let who = Caller::root();
        let attr = match kind {
            Kind::File => self.fs.mknod(&who, dir, &name, libc::S_IFREG | 0o644, 0)?,
            Kind::Dir => self.fs.mkdir(&who, dir, &name, 0o755)?,
            Kind::Link => self.fs.symlink(&who, dir, &name, b"somewhere")?,
        };
        let mut next = self.oracle.now().clone();
        next.tree.add(dir, &name, attr.ino, kind);
        let mode = attr.mode & 0o7777;
        let generation = attr.generation;
        let marks = Marks {
            generation,
            mode,
            mark: None,
        };
        next.marks.insert(attr.ino, marks);
        self.oracle.push(next, &[attr.ino]);
        let fresh = History {
            first: 0,
            versions: vec![Vec::new()],
        };
        self.oracle.contents.insert((attr.ino, generation), fresh);
        Ok(())
    }

    fn rename(&mut self) -> Result<(), fs::Error> {
        let (from, name, to, new) = (self.dir(), self.name(), self.dir(), self.name());
        let flags = *self
            .rng
            .pick(&[0, 0, 0, fs::RENAME_NOREPLACE, fs::RENAME_EXCHANGE]);
        let tree = &self.oracle.now().tree;
        let (source, target) = (tree.find(from, &name), tree.find(to, &new));
        let touched: Vec<Ino> = [source, target].into_iter().flatten().collect();
        let replacer = source.map(|ino| self.oracle.id(ino));
        let done = self.names_change(
            &touched,
            |model| model.rename((from, &name), (to, &new), flags),
            |fs| fs.rename(&Caller::root(), from, &name, to, &new, flags),
        )?;
        if let (true, Some(file), Some(target)) = (done, replacer, target)
            && flags == 0
            && file.0 != target
            && let Some(history) = self.oracle.contents.get(&file)
        {
            // Who replaces a file has its own content by then.
            let barrier = Barrier {
                operations: self.oracle.operations(),
                file,
                version: history.number(),
            };
            self.oracle.barriers.push(barrier);
        }
        Ok(())
    }

    fn remove(&mut self, directory: bool) -> Result<(), fs::Error> {
        let (dir, name) = (self.dir(), self.name());
        let who = Caller::root();
        let found = self.oracle.now().tree.find(dir, &name);
        if let Some(ino) = found
            && self.rng.one_in(2)
        {
            // Half of the time nobody has it open.
            self.open.remove(&ino);
        }
        let touched: Vec<Ino> = found.into_iter().collect();
        self.names_change(
            &touched,
            |model| model.remove(dir, &name, directory),
            |fs| match directory {
                true => fs.rmdir(&who, dir, &name),
                false => fs.unlink(&who, dir, &name),
            },
        )?;
        Ok(())
    }

    fn link(&mut self) -> Result<(), fs::Error> {
        let (dir, name) = (self.dir(), self.name());
        let Some(ino) = self.file() else {
            return Ok(());
        };
        let real = |fs: &FileSystem| fs.link(&Caller::root(), ino, dir, &name).map(|_| ());
        self.names_change(&[ino], |model| model.link(ino, dir, &name), real)?;
        Ok(())
    }

    fn mark(&mut self) -> Result<(), fs::Error> {
        let Some(ino) = self.file() else {
            return Ok(());
        };
        let who = Caller::root();
        let mut next = self.oracle.now().clone();
        let marks = next.marks.get_mut(&ino).expect("files have marks");
        let change = self.rng.below(3);
        let mut value = vec![0; self.rng.below(6000) as usize];
        self.rng.fill(&mut value);
        let mode = 0o600 + self.rng.below(0o177) as u32;
        match change {
            0 => marks.mode = mode,
            1 => marks.mark = Some(value.clone()),
            _ if marks.mark.is_none() => return Ok(()),
            _ => marks.mark = None,
        }
        self.oracle.push(next, &[ino]);
        match change {
            0 => {
                let set = SetAttr {
                    mode: Some(mode),
                    ..SetAttr::default()
                };
                self.fs.setattr(&who, ino, &set).map(|_| ())
            }
            1 => self.fs.setxattr(&who, ino, MARK, &value, 0),
            _ => self.fs.removexattr(&who, ino, MARK),
        }
    }

    fn handle(&mut self, ino: Ino) -> Result<Arc<OpenFile>, fs::Error> {
        if self.open.len() > 6 {
            self.open.pop_first();
        }
        match self.open.get(&ino) {
            Some(file) => Ok(Arc::clone(file)),
            None => {
                let file = self.fs.open_file(ino, libc::O_RDWR)?;
                self.open.insert(ino, Arc::clone(&file));
                Ok(file)
            }
        }
    }

    fn change_content(&mut self) -> Result<(), fs::Error> {
        let Some(ino) = self.file() else {
            return Ok(());
        };
        let file = self.handle(ino)?;
        let id = self.oracle.id(ino);
        let history = self
            .oracle
            .contents
            .get_mut(&id)
            .expect("files have content");
        let mut bytes = history.newest().clone();
        let rng = &mut self.rng;
        let most = *rng.pick(&[100, 3000, 20_000, 150_000]);
        let mut data = vec![0; rng.below(most) as usize + 1];
        rng.fill(&mut data);
        let offset = match rng.below(4) {
            0 => 0,
            1 => bytes.len(),
            _ => rng.below(most + 1) as usize,
        };
        let cut = rng.below(bytes.len() as u64 * 5 / 4 + 1) as usize;
        match rng.below(8) {
            0 => {
                bytes.resize(cut, 0);
                history.versions.push(bytes);
                self.fs.truncate(&Caller::root(), ino, cut as u64)?;
            }
            1 => {
                // Rewritten from nothing, as an editor does.
                history.versions.push(Vec::new());
                history.versions.push(data.clone());
                self.fs.truncate(&Caller::root(), ino, 0)?;
                write_all(&self.fs, &file, 0, &data)?;
            }
            _ => {
                if bytes.len() < offset + data.len() {
                    bytes.resize(offset + data.len(), 0);
                }
                bytes[offset..offset + data.len()].copy_from_slice(&data);
                history.versions.push(bytes);
                write_all(&self.fs, &file, offset, &data)?;
            }
        }
        Ok(())
    }

    fn fsync(&mut self) -> Result<(), fs::Error> {
        let Some(ino) = self.file() else {
            return Ok(());
        };
        let file = self.handle(ino)?;
        let data_only = self.rng.one_in(3);
        self.fs.fsync(&file, data_only)?;
        self.oracle.fsynced(ino);
        Ok(())
    }

    /// One random step; an error is the power's doing.
    fn step(&mut self, world: &World) -> Result<(), fs::Error> {
        world
            .clock
            .advance(Duration::from_millis(self.rng.below(300)));
        match self.rng.below(40) {
            0..=5 => self.create(Kind::File),
            6 => self.create(Kind::Dir),
            7 => self.create(Kind::Link),
            8..=12 => self.rename(),
            13..=15 => self.remove(false),
            16 => self.remove(true),
            17 => self.link(),
            18..=19 => self.mark(),
            20..=33 => self.change_content(),
            34..=35 => self.fsync(),
            36 => {
                self.fs.sync()?;
                self.oracle.synced();
                Ok(())
            }
            37 => Ok(self.fs.store().checkpoint()?),
            _ => self.fs.tick(),
        }
    }
}

fn write_all(
    fs: &FileSystem,
    file: &OpenFile,
    mut offset: usize,
    mut data: &[u8],
) -> Result<(), fs::Error> {
    while !data.is_empty() {
        let n = fs.write(file, offset as u64, data)?;
        offset += n;
        data = &data[n..];
    }
    Ok(())
}

fn run(seed: u64, cycles: u64) {
    eprintln!("seed {seed}");
    let mut rng = Rng::new(seed);
    let devices = rng.range(1, 4) as usize;
    let mut world = World::new(devices, (192 << 20) / devices as u64, seed);
    if rng.one_in(2) {
        // Few hashes: buckets split late, and names collide.
        world.options.hash_mask = Some(0xF << 60);
    }
    let fs = world.open();
    let oracle = Oracle::new(&fs);
    let mut run = Run {
        fs,
        oracle,
        open: BTreeMap::new(),
        names: rng.range(8, 120),
        rng,
    };
    for _ in 0..cycles {
        let operations = *run.rng.pick(&[20, 200, 1500]);
        let cut = world.switch.operations() + run.rng.below(operations);
        world.switch.cut_after(cut);
        for _ in 0..3000 {
            if let Err(error) = run.step(&world) {
                assert!(world.switch.is_cut(), "seed {seed}: {error}");
                break;
            }
        }
        world.switch.cut_now();
        run.open.clear();
        let Run { fs, rng, .. } = &mut run;
        world.restart(rng);
        // The old one goes last: it must not disturb the new devices.
        let fresh = open_through_cuts(&mut world, rng, seed);
        *fs = fresh;
        world.check();
        check_and_settle(&run.fs, &mut run.oracle, seed);
    }
    run.fs.close().unwrap();
}

/// Opens after a cut; sometimes the power goes again in the middle of recovery.
fn open_through_cuts(world: &mut World, rng: &mut Rng, seed: u64) -> Arc<FileSystem> {
    while rng.one_in(3) {
        world
            .switch
            .cut_after(world.switch.operations() + rng.below(60));
        match world.try_open() {
            Ok(fs) => drop(fs),
            Err(error) => assert!(world.switch.is_cut(), "seed {seed}: {error}"),
        }
        world.switch.cut_now();
        world.restart(rng);
    }
    match world.try_open() {
        Ok(fs) => fs,
        Err(error) => panic!("seed {seed}: {error}"),
    }
}

#[test]
fn a_power_cut_loses_nothing_that_was_synced() {
    // SHEAF_SEEDS=100-200 runs others.
    let range = std::env::var("SHEAF_SEEDS").unwrap_or("1-3".into());
    let (first, last) = range.split_once('-').unwrap_or((&range, &range));
    for seed in first.parse().unwrap()..=last.parse().unwrap() {
        run(seed, 12);
    }
}

#[test]
fn a_clean_remount_changes_nothing() {
    let mut world = World::new(2, 64 << 20, 77);
    let fs = world.open();
    let oracle = Oracle::new(&fs);
    let mut run = Run {
        fs,
        oracle,
        open: BTreeMap::new(),
        names: 60,
        rng: Rng::new(77),
    };
    for _ in 0..10 {
        for _ in 0..300 {
            run.step(&world).unwrap();
        }
        run.open.clear();
        run.oracle.synced();
        run.fs = world.remount(run.fs);
        check_and_settle(&run.fs, &mut run.oracle, 77);
    }
}

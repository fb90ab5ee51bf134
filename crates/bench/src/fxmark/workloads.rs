//! The workloads: what each needs prepared, and what it repeats.
//!
//! Definitions are those of FxMark (Min et al., USENIX ATC 2016; sslab-gatech/fxmark, `src/`),
//! by file name there: its table of names has MWUL and MWUM exchanged, here L is the private
//! and M the shared directory as everywhere else. Three things differ, each because the
//! original would not measure what it says:
//!
//! - MRPM draws all five levels uniformly. The original's generator has a period of eight in
//!   the bits it uses, so that each thread looks at eight files only.
//! - MRDL and MRDM count entries, and open the directory again at its end. The original goes
//!   on calling at the end, and counts that.
//! - What the original makes until the device is full, or for the length of a window, is a
//!   pool of a given size.

use std::fmt::Write;

use base::rng::Rng;

use crate::Error;
use crate::page::{FILLED, PAGE, Page};
use crate::runner::{Background, Load, Operation, Stop};
use crate::target::Side;

/// Each thread's part of a shared file.
const REGION: u64 = 8 << 20;
/// Branches at each of the levels of the tree that paths lead through.
pub const BRANCHES: u64 = 8;
const LEVELS: u32 = 5;
/// The name of a file that is alone, or shared by all.
const FILE: &str = "file.dat";

/// What a workload's pool is: what is prepared for all threads together, or may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// It repeats something that changes nothing, or the same thing.
    None,
    /// Empty files; so many that the given pool divided by this.
    Files(u64),
    /// Files of one page.
    PageFiles,
    /// Pages of files.
    Pages,
}

impl Pool {
    /// How many of the pool that was asked for this is.
    pub fn size(self, asked: u64) -> Option<u64> {
        match self {
            Pool::None => None,
            Pool::Files(part) => Some(asked / part),
            Pool::PageFiles | Pool::Pages => Some(asked),
        }
    }

    pub fn unit(self) -> &'static str {
        match self {
            Pool::None => "",
            Pool::Files(_) => "files",
            Pool::PageFiles => "files of 4 KiB",
            Pool::Pages => "pages of 4 KiB",
        }
    }
}

/// A row of [`WORKLOADS`].
#[derive(Debug, PartialEq, Eq)]
pub struct Workload {
    pub name: &'static str,
    /// What each thread does.
    pub definition: &'static str,
    pub pool: Pool,
}

const fn workload(name: &'static str, pool: Pool, definition: &'static str) -> Workload {
    Workload {
        name,
        definition,
        pool,
    }
}

/// All workloads, in FxMark's families: metadata writes and reads, data writes and reads. L, M
/// and H at the end are low, medium and high contention.
pub const WORKLOADS: &[Workload] = &[
    workload(
        "MWCL",
        Pool::Files(1),
        "creates empty files in its own directory",
    ),
    workload(
        "MWCM",
        Pool::PageFiles,
        "creates files of 4 KiB in a directory shared by all",
    ),
    workload(
        "MWUL",
        Pool::Files(1),
        "unlinks empty files of its own directory",
    ),
    workload(
        "MWUM",
        Pool::Files(1),
        "unlinks empty files of a directory shared by all",
    ),
    workload("MWRL", Pool::None, "renames a file in its own directory"),
    workload(
        "MWRM",
        Pool::Files(1),
        "moves files from its own directory to one shared by all",
    ),
    workload("MRPL", Pool::None, "stats its own file, five levels deep"),
    workload(
        "MRPM",
        Pool::None,
        "stats random files of 32,768, five levels deep",
    ),
    workload(
        "MRPH",
        Pool::None,
        "stats one file that all stat, five levels deep",
    ),
    workload(
        "MRDL",
        Pool::Files(10),
        "reads the entries of its own directory",
    ),
    workload(
        "MRDM",
        Pool::Files(10),
        "reads the entries of a directory shared by all",
    ),
    workload("DWAL", Pool::Pages, "appends pages to its own file"),
    workload("DWOL", Pool::None, "overwrites a page of its own file"),
    workload(
        "DWOM",
        Pool::None,
        "overwrites its own page of a file shared by all",
    ),
    workload(
        "DWSL",
        Pool::None,
        "overwrites a page of its own file, and syncs the file",
    ),
    workload("DWTL", Pool::Pages, "cuts a page off its own file"),
    workload("DRBL", Pool::None, "reads a page of its own file"),
    workload(
        "DRBM",
        Pool::None,
        "reads its own page of a file shared by all",
    ),
    workload("DRBH", Pool::None, "reads one page that all read"),
];

/// As MWCM, but of empty files: a directory's changes alone. No part of FxMark.
pub const EMPTY_SHARED: Workload = workload(
    "MWCM-empty",
    Pool::Files(1),
    "creates empty files in a directory shared by all",
);

/// The workload of this name.
pub fn find(name: &str) -> Option<&'static Workload> {
    WORKLOADS.iter().find(|workload| workload.name == name)
}

/// One workload on one file system, by so many threads.
pub struct Run<'a, S: Side> {
    side: &'a S,
    workload: &'static Workload,
    root: S::Dir,
    /// Of the pool, for each thread.
    share: u64,
    branches: u64,
}

/// How much of it.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub threads: usize,
    /// Of the workload's objects, for all threads together.
    pub pool: u64,
    /// Of the tree: [`BRANCHES`], fewer in tests.
    pub branches: u64,
}

impl<'a, S: Side> Run<'a, S> {
    /// Prepares what all threads share.
    pub fn prepare(side: &'a S, workload: &'static Workload, scale: Scale) -> Result<Self, Error> {
        let threads = scale.threads as u64;
        let run = Run {
            side,
            workload,
            root: side.root(),
            share: (scale.pool / threads).max(1),
            branches: scale.branches,
        };
        match workload.name {
            "MRPM" | "MRPH" => run.make_tree(&run.root, 0)?,
            "DWOM" | "DRBM" => run.make_shared_file(threads * REGION)?,
            "DRBH" => run.make_shared_file(PAGE as u64)?,
            _ => {}
        }
        Ok(run)
    }

    fn make_tree(&self, dir: &S::Dir, level: u32) -> Result<(), Error> {
        crate::interrupt::check()?;
        for branch in 0..self.branches {
            let name = branch.to_string();
            if level + 1 == LEVELS {
                self.side.create(dir, &name)?;
            } else {
                self.make_tree(&self.side.make_dir(dir, &name)?, level + 1)?;
            }
        }
        Ok(())
    }

    fn make_shared_file(&self, bytes: u64) -> Result<(), Error> {
        let file = self.side.create(&self.root, FILE)?;
        self.fill(&file, bytes / PAGE as u64, &Stop::default())?;
        self.side.fsync(&file)
    }

    fn fill(&self, file: &S::File, pages: u64, stop: &Stop) -> Result<(), Error> {
        for page in 0..pages {
            stop.check()?;
            self.side.write(file, page * PAGE as u64, &FILLED.0)?;
        }
        Ok(())
    }

    /// The thread's own directory.
    fn own_dir(&self, thread: usize) -> Result<S::Dir, Error> {
        self.side.make_dir(&self.root, &thread.to_string())
    }

    /// The thread's own file, with so many pages.
    fn own_file(&self, thread: usize, pages: u64, stop: &Stop) -> Result<S::File, Error> {
        let file = self.side.create(&self.own_dir(thread)?, FILE)?;
        self.fill(&file, pages, stop)?;
        Ok(file)
    }

    /// The thread's share of the pool as empty files in `dir`.
    fn make_files(&self, dir: &S::Dir, thread: usize, stop: &Stop) -> Result<(), Error> {
        let mut names = Names::new(thread, self.share);
        while let Some(name) = names.next() {
            stop.check()?;
            self.side.create(dir, name)?;
        }
        Ok(())
    }

    fn creating(&self, dir: S::Dir, thread: usize, content: &'static [u8]) -> Operation<'_> {
        let mut names = Names::new(thread, self.share);
        Box::new(move || {
            let Some(name) = names.next() else {
                return Ok(0);
            };
            let file = self.side.create(&dir, name)?;
            if !content.is_empty() {
                self.side.write(&file, 0, content)?;
            }
            Ok(1)
        })
    }

    /// Where a thread first makes files in a directory that it shares with others: makes one of them. All made, [`Run::filled`] goes
    /// on.
    pub fn filling(&self, thread: usize) -> Option<Operation<'_>> {
        let shared = self.workload.name == "MWUM";
        shared.then(|| self.creating(self.root.clone(), thread, &[]))
    }

    /// What `prepare` returns where [`Run::filling`] has made the files.
    pub fn filled(&self, thread: usize) -> Operation<'_> {
        self.unlinking(self.root.clone(), thread)
    }

    fn unlinking(&self, dir: S::Dir, thread: usize) -> Operation<'_> {
        let mut names = Names::new(thread, self.share);
        Box::new(move || match names.next() {
            Some(name) => self.side.unlink(&dir, name).map(|()| 1),
            None => Ok(0),
        })
    }

    fn moving(&self, dir: S::Dir, thread: usize) -> Operation<'_> {
        let mut names = Names::new(thread, self.share);
        Box::new(move || match names.next() {
            Some(name) => {
                self.side.rename(&dir, name, &self.root, name)?;
                Ok(1)
            }
            None => Ok(0),
        })
    }

    fn renaming(&self, dir: S::Dir, thread: usize) -> Result<Operation<'_>, Error> {
        let mut old = Names::new(thread, u64::MAX);
        let mut new = Names::new(thread, u64::MAX);
        if let Some(name) = new.next() {
            self.side.fsync(&self.side.create(&dir, name)?)?;
        }
        Ok(Box::new(move || {
            let (Some(old), Some(new)) = (old.next(), new.next()) else {
                return Ok(0);
            };
            self.side.rename(&dir, old, &dir, new)?;
            Ok(1)
        }))
    }

    fn stating(&self, mut next: impl FnMut(&mut String) + Send + 'static) -> Operation<'_> {
        let mut path = String::new();
        Box::new(move || {
            next(&mut path);
            self.side.stat(&self.root, &path).map(|_| 1)
        })
    }

    fn own_path(&self, thread: usize) -> Result<String, Error> {
        let mut dir = self.own_dir(thread)?;
        let mut path = thread.to_string();
        for _ in 1..LEVELS - 1 {
            dir = self.side.make_dir(&dir, "0")?;
            path.push_str("/0");
        }
        self.side.create(&dir, "0")?;
        path.push_str("/0");
        Ok(path)
    }

    fn listing(&self, dir: S::Dir, stop: &Stop) -> Operation<'_> {
        let stop = stop.clone();
        Box::new(move || {
            let mut entries = 0;
            self.side.list(&dir, &mut || {
                entries += 1;
                !stop.is_set()
            })?;
            Ok(entries)
        })
    }

    fn appending(&self, file: S::File) -> Operation<'_> {
        let mut page = 0;
        Box::new(move || {
            if page == self.share {
                return Ok(0);
            }
            self.side.write(&file, page * PAGE as u64, &FILLED.0)?;
            page += 1;
            Ok(1)
        })
    }

    fn cutting(&self, dir: S::Dir) -> Operation<'_> {
        let mut pages = self.share;
        Box::new(move || {
            let Some(left) = pages.checked_sub(1) else {
                return Ok(0);
            };
            self.side.truncate(&dir, FILE, left * PAGE as u64)?;
            pages = left;
            Ok(1)
        })
    }

    fn writing(&self, file: S::File, offset: u64, sync: bool) -> Operation<'_> {
        Box::new(move || {
            self.side.write(&file, offset, &FILLED.0)?;
            if sync {
                self.side.fsync(&file)?;
            }
            Ok(1)
        })
    }

    fn reading(&self, file: S::File, offset: u64) -> Operation<'_> {
        let mut page = Page::of(0);
        Box::new(move || self.side.read(&file, offset, &mut page.0).map(|()| 1))
    }

    fn shared_file(&self) -> Result<S::File, Error> {
        self.side.open(&self.root, FILE)
    }
}

impl<S: Side> Load for Run<'_, S> {
    fn prepare(&self, thread: usize, stop: &Stop) -> Result<Operation<'_>, Error> {
        let region = thread as u64 * REGION;
        Ok(match self.workload.name {
            "MWCL" => self.creating(self.own_dir(thread)?, thread, &[]),
            "MWCM" => self.creating(self.root.clone(), thread, &FILLED.0),
            "MWCM-empty" => self.creating(self.root.clone(), thread, &[]),
            "MWUL" => {
                let dir = self.own_dir(thread)?;
                self.make_files(&dir, thread, stop)?;
                self.unlinking(dir, thread)
            }
            "MWUM" => {
                self.make_files(&self.root, thread, stop)?;
                self.unlinking(self.root.clone(), thread)
            }
            "MWRL" => self.renaming(self.own_dir(thread)?, thread)?,
            "MWRM" => {
                let dir = self.own_dir(thread)?;
                self.make_files(&dir, thread, stop)?;
                self.moving(dir, thread)
            }
            "MRPL" => {
                let own = self.own_path(thread)?;
                self.stating(move |path| path.clone_from(&own))
            }
            "MRPM" => {
                let (mut rng, branches) = (Rng::new(thread as u64), self.branches);
                self.stating(move |path| random_path(&mut rng, branches, path))
            }
            "MRPH" => self.stating(|path| path.replace_range(.., "0/0/0/0/0")),
            "MRDL" => {
                let dir = self.own_dir(thread)?;
                self.make_files(&dir, thread, stop)?;
                self.listing(dir, stop)
            }
            "MRDM" => {
                self.make_files(&self.root, thread, stop)?;
                self.listing(self.root.clone(), stop)
            }
            "DWAL" => self.appending(self.own_file(thread, 0, stop)?),
            "DWOL" => self.writing(self.own_file(thread, 1, stop)?, 0, false),
            "DWOM" => self.writing(self.shared_file()?, region, false),
            "DWSL" => self.writing(self.own_file(thread, 1, stop)?, 0, true),
            "DWTL" => {
                let dir = self.own_dir(thread)?;
                let file = self.side.create(&dir, FILE)?;
                self.fill(&file, self.share, stop)?;
                self.cutting(dir)
            }
            "DRBL" => self.reading(self.own_file(thread, 1, stop)?, 0),
            "DRBM" => self.reading(self.shared_file()?, region),
            "DRBH" => self.reading(self.shared_file()?, 0),
            name => return Err(Error::Usage(format!("there is no workload '{name}'"))),
        })
    }

    fn settle(&self) -> Result<(), Error> {
        self.side.sync()
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        self.side.cpu_ns()
    }

    fn background(&self) -> Option<Background> {
        self.side.background()
    }
}

/// A file of the tree.
fn random_path(rng: &mut Rng, branches: u64, path: &mut String) {
    path.clear();
    for level in 0..LEVELS {
        if level > 0 {
            path.push('/');
        }
        path.push((b'0' + rng.below(branches) as u8) as char);
    }
}

/// The names of a thread's files, one after the other.
struct Names {
    name: String,
    thread: usize,
    next: u64,
    count: u64,
}

impl Names {
    fn new(thread: usize, count: u64) -> Names {
        Names {
            name: String::new(),
            thread,
            next: 0,
            count,
        }
    }

    fn next(&mut self) -> Option<&str> {
        if self.next == self.count {
            return None;
        }
        self.name.clear();
        // Writing to a string does not fail.
        let _ = write!(self.name, "fxmark-{}-{}.dat", self.thread, self.next);
        self.next += 1;
        Some(&self.name)
    }
}

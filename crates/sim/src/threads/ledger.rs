//! What is known of each task's work: the entries after each of its operations, the versions of
//! its files, and how much of both is surely durable.

use super::deceit::Deceit;
use crate::content::{SECTOR, Versions, explain};
use crate::setting::Trouble;
use base::sched;
use base::sync::Mutex;
use format::BLOCK_SIZE;
use fs::Ino;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where an entry is: the number of a common directory, and a name in it.
pub(super) type Place = (usize, Vec<u8>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Dir,
}

impl Kind {
    /// With which they are created.
    pub fn mode(self) -> u32 {
        match self {
            Kind::File => 0o644,
            Kind::Dir => 0o755,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub ino: Ino,
    pub generation: u64,
    pub kind: Kind,
    pub mode: u32,
    pub links: u32,
    /// Length and checksum of its attribute.
    pub mark: Option<(usize, u32)>,
}

pub(super) type Entries = BTreeMap<Place, Entry>;

/// What a file may hold: its versions since the one that is surely there.
#[derive(Clone, Debug)]
pub(super) struct History {
    pub versions: Versions<Vec<u8>>,
    /// The newest version whose write has returned.
    pub written: usize,
    /// What the file may hold in the place of the version of each number, on from one that a look showed where devices had lied.
    beside: Vec<(usize, Vec<u8>)>,
    doubt: Option<Doubt>,
    /// An operation failed half-way, and what it left could not be read.
    pub unknown: bool,
    /// Versions that are durable if the journal's tail is there.
    promises: Vec<Promise>,
}

/// What is durable unless devices lied about all that the journal got since.
#[derive(Clone, Copy, Debug)]
struct Promise {
    /// As [`Deceit::mark`] said when it was given.
    mark: usize,
    /// So many operations, or the version of this number.
    of: usize,
}

/// What devices may have lost although nobody says so any more: somebody was told of a failure.
#[derive(Clone, Debug, Default)]
struct Doubt {
    /// What there was at that time, one of which each sector may hold.
    versions: Vec<Vec<u8>>,
    /// The version from which on the size is certain: that of the first look since.
    seen: Option<usize>,
    /// The version from which on a page is certain: that of the first write of it since.
    written: BTreeMap<usize, usize>,
}

impl Doubt {
    fn of_size(&self, durable: usize) -> bool {
        self.seen.is_none_or(|certain| certain > durable)
    }

    fn of_page(&self, page: usize, durable: usize) -> bool {
        self.written
            .get(&page)
            .is_none_or(|certain| *certain > durable)
    }
}

impl History {
    pub fn new(bytes: Vec<u8>) -> History {
        History {
            versions: Versions::new(bytes),
            written: 0,
            beside: Vec::new(),
            doubt: None,
            unknown: false,
            promises: Vec::new(),
        }
    }

    /// A write of these bytes begins, or a truncation, that makes it this version.
    pub fn begin(&mut self, version: Vec<u8>, bytes: Range<usize>) {
        for mut other in self.beside_newest() {
            other.resize(version.len(), 0);
            other[bytes.clone()].copy_from_slice(&version[bytes.clone()]);
            self.beside.push((self.versions.number() + 1, other));
        }
        self.versions.push(version);
        let number = self.versions.number();
        if let Some(doubt) = &mut self.doubt {
            for page in bytes.start / BLOCK_SIZE..bytes.end.div_ceil(BLOCK_SIZE) {
                doubt.written.entry(page).or_insert(number);
            }
        }
    }

    /// The numbered version is durable; where devices lie, `mark` says how much of the journal was
    /// written by now.
    pub fn durable(&mut self, number: usize, mark: Option<usize>) {
        match mark {
            None => self.versions.forget_before(number),
            Some(mark) => self.promises.push(Promise { mark, of: number }),
        }
    }

    /// What the file may hold in the place of the newest version.
    fn beside_newest(&self) -> Vec<Vec<u8>> {
        let newest = self.versions.number();
        let mine = self.beside.iter().filter(|(number, _)| *number == newest);
        mine.map(|(_, bytes)| bytes.clone()).collect()
    }

    /// The file holds this now, as its owner sees while nobody changes it. Where devices have lied it may hold as well what was known
    /// of it: a read past the cache shows what a lie left of pages that the cache has as they were written, and from there they are
    /// written to in part, and go home.
    pub fn observe(&mut self, found: Vec<u8>, deceit: Option<&Deceit>) -> Result<(), String> {
        if found != *self.newest() {
            if !self.unknown {
                self.allows(&found, deceit)?;
            }
            if deceit.is_some_and(Deceit::ever) {
                let mut others = self.beside_newest();
                others.push(self.newest().clone());
                others.retain(|other| *other != found);
                let number = self.versions.number() + 1;
                let others = others.into_iter().map(|other| (number, other));
                self.beside.extend(others);
            }
            self.versions.push(found);
        }
        (self.written, self.unknown) = (self.versions.number(), false);
        if let Some(doubt) = &mut self.doubt {
            doubt.seen.get_or_insert(self.written);
        }
        Ok(())
    }

    /// Somebody was told that a device lost what had been written: whatever is not durable for
    /// certain by now need not be later.
    pub fn doubt(&mut self) {
        if self.versions.iter().len() == 1 && self.doubt.is_none() && !self.unknown {
            return;
        }
        let mut versions = self.doubt.take().map_or_else(Vec::new, |d| d.versions);
        versions.extend(self.possible().cloned());
        self.doubt = Some(Doubt {
            versions,
            ..Doubt::default()
        });
    }

    pub fn newest(&self) -> &Vec<u8> {
        self.versions.last()
    }

    /// What a read may show that began when this was as in `before`, and ended now: the versions
    /// that there were from `oldest` on, and all since.
    pub fn since(&self, before: &History, oldest: usize) -> History {
        let mut shown = before.clone();
        shown.versions.forget_before(oldest);
        for newer in self.versions.from(before.versions.number() + 1) {
            shown.versions.push(newer.clone());
        }
        let known = before.versions.number();
        let newer = self.beside.iter().filter(|(number, _)| *number > known);
        shown.beside.extend(newer.cloned());
        shown
    }

    /// What the file may hold, whatever devices have lost.
    fn possible(&self) -> impl Iterator<Item = &Vec<u8>> {
        let first = self.versions.first_number();
        let beside = self
            .beside
            .iter()
            .filter(move |(number, _)| *number >= first);
        self.versions.iter().chain(beside.map(|(_, bytes)| bytes))
    }

    /// Whether this may be there, after a crash or while nobody knows what devices have lost.
    pub fn allows(&self, found: &[u8], deceit: Option<&Deceit>) -> Result<(), String> {
        let durable = self.versions.first_number();
        let doubt = self.doubt.as_ref();
        let lost = |certain: &dyn Fn(&Doubt) -> bool| {
            let doubt = doubt.filter(|doubt| certain(doubt));
            doubt.map_or(&[][..], |doubt| &doubt.versions)
        };
        let sizes = lost(&|doubt| doubt.of_size(durable)).iter();
        let sizes = self.versions.iter().chain(sizes).map(Vec::len);
        explain(found, sizes, |i, sector| {
            let at = i * SECTOR;
            let fits = |version: &Vec<u8>| {
                (0..sector.len()).all(|j| sector[j] == version.get(at + j).copied().unwrap_or(0))
            };
            let mut lost = lost(&|doubt| doubt.of_page(at / BLOCK_SIZE, durable)).iter();
            let holds = |version: &Vec<u8>, j: usize, byte: u8| {
                version.get(at + j).copied().unwrap_or(0) == byte
            };
            self.possible().any(fits)
                || lost.any(fits)
                || deceit.is_some_and(|deceit| {
                    let known = |j, byte| self.possible().any(|v| holds(v, j, byte));
                    deceit.explains(sector, known)
                })
        })
    }
}

impl History {
    /// Whether each page is as it was at one moment: a read copies one beside whoever overwrites it. Of what is in memory, where nothing
    /// has failed.
    pub fn allows_pages(&self, found: &[u8]) -> Result<(), String> {
        for (i, page) in found.chunks(BLOCK_SIZE).enumerate() {
            let at = i * BLOCK_SIZE;
            let is = |version: &Vec<u8>| {
                let kept = version.get(at..).unwrap_or_default();
                let kept = &kept[..kept.len().min(page.len())];
                page.starts_with(kept) && page[kept.len()..].iter().all(|byte| *byte == 0)
            };
            if !self.versions.iter().any(is) {
                return Err(format!("page {i} is parts of several versions"));
            }
        }
        Ok(())
    }
}

/// An operation on names and attributes, by the order of calls and returns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub called: u64,
    pub returned: u64,
}

/// A create that was called.
#[derive(Debug)]
pub(super) struct Creating {
    pub place: Place,
    pub kind: Kind,
    pub called: u64,
}

/// What is known of one task's work.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Entries after each operation since the newest that is surely durable, which is first.
    pub states: Vec<Entries>,
    /// When each of these operations ran; that of the first is not asked for.
    pub spans: Vec<Span>,
    /// Operations before the first of `states`.
    pub before: usize,
    pub files: BTreeMap<(Ino, u64), History>,
    /// The last operation on each inode, and in each common directory.
    pub touched: BTreeMap<Ino, usize>,
    /// An operation was called and has not returned.
    pub pending: bool,
    /// What the last create makes that was called and has not returned well.
    pub creating: Option<Creating>,
    promises: Vec<Promise>,
}

impl Ledger {
    pub fn new(entries: Entries) -> Ledger {
        Ledger {
            states: vec![entries],
            spans: vec![Span {
                called: 0,
                returned: 0,
            }],
            ..Ledger::default()
        }
    }

    pub fn now(&self) -> &Entries {
        self.states.last().expect("there is a state")
    }

    pub fn operations(&self) -> usize {
        self.before + self.states.len() - 1
    }

    /// So many operations are durable; where devices lie, `mark` says how much of the journal was
    /// written by now.
    pub fn durable(&mut self, operations: usize, mark: Option<usize>) {
        match mark {
            None => self.forget_before(operations),
            Some(mark) => self.promises.push(Promise {
                mark,
                of: operations,
            }),
        }
    }

    /// The power is off: what was promised counts as far as it is firm.
    pub fn settle(&mut self, firm: impl Fn(usize) -> bool) {
        let kept = |promises: &mut Vec<Promise>| {
            let promises = std::mem::take(promises).into_iter();
            let firm = promises.filter(|p| firm(p.mark)).map(|p| p.of);
            firm.max()
        };
        if let Some(operations) = kept(&mut self.promises) {
            self.forget_before(operations);
        }
        for history in self.files.values_mut() {
            if let Some(number) = kept(&mut history.promises) {
                history.versions.forget_before(number);
            }
        }
    }

    fn forget_before(&mut self, operations: usize) {
        let drop = operations.saturating_sub(self.before);
        self.states.drain(..drop);
        self.spans.drain(..drop);
        self.before += drop;
    }
}

/// Everything that is known, shared by the tasks.
pub(super) struct Known {
    /// Counts calls and returns.
    pub moment: AtomicU64,
    pub trouble: Trouble,
    /// What devices lie about in this round.
    pub deceit: Option<Arc<Deceit>>,
    /// Devices have lied, in this round or before.
    pub lied: bool,
    /// Operations of a task between two faults, on average.
    pub fault_every: u64,
    /// Syncs that are running.
    pub syncing: AtomicU64,
    /// What the tasks did, where somebody wants to read it.
    pub trail: Option<Arc<Mutex<Vec<String>>>>,
    /// Names that a task has, and how long they are.
    pub names: u64,
    pub name_len: usize,
    pub mark_max: u64,
    pub juggled: Vec<Ino>,
    pub ledgers: Vec<Mutex<Ledger>>,
}

/// What a sync covers of one task: operations, and the newest version of each file.
pub(super) type Covered = (usize, Vec<((Ino, u64), usize)>);

impl Known {
    pub fn note(&self, what: impl FnOnce() -> String) {
        if let Some(trail) = &self.trail {
            sched::quietly(|| trail.lock().push(what()));
        }
    }

    pub fn tick(&self) -> u64 {
        self.moment.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What a sync that is called now will cover: operations and versions by task.
    pub fn covered(&self) -> Vec<Covered> {
        let ledgers = self.ledgers.iter();
        ledgers
            .map(|ledger| {
                let ledger = ledger.lock();
                let files = ledger.files.iter();
                let versions = files.map(|(id, history)| (*id, history.written));
                // The newest state may be one whose operation has not returned.
                let operations = ledger.operations() - usize::from(ledger.pending);
                (operations, versions.collect())
            })
            .collect()
    }

    /// A sync that covers this has succeeded. What failed for another sync that runs still, it
    /// may not have been told of: then contents are left alone.
    pub fn cover(&self, covered: Vec<Covered>) {
        let alone = self.syncing.load(Ordering::Relaxed) == 1;
        let mark = self.mark();
        for (ledger, (operations, mut versions)) in self.ledgers.iter().zip(covered) {
            let mut ledger = ledger.lock();
            ledger.durable(operations, mark);
            if !alone && self.may_fail() {
                versions.clear();
            }
            for (id, number) in versions {
                if let Some(history) = ledger.files.get_mut(&id) {
                    history.durable(number, mark);
                }
            }
        }
    }

    /// Whether operations may fail although there is power.
    pub fn may_fail(&self) -> bool {
        matches!(self.trouble, Trouble::Errors | Trouble::Lies) || self.lied
    }

    /// Whether devices have lied.
    pub fn lied(&self) -> bool {
        self.lied || self.deceit.as_ref().is_some_and(|d| d.ever())
    }

    /// How much of the journal is written, where devices lie.
    pub fn mark(&self) -> Option<usize> {
        self.deceit.as_ref().map(|deceit| deceit.mark())
    }

    /// A sync has failed, and with that told of all that was lost before.
    pub fn doubt(&self) {
        for ledger in &self.ledgers {
            ledger.lock().files.values_mut().for_each(History::doubt);
        }
    }
}

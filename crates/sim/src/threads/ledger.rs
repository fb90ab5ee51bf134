//! What is known of each task's work: the entries after each of its operations, the versions of
//! its files, and how much of both is surely durable.

use base::sched;
use base::sync::Mutex;
use fs::Ino;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The unit of which a crash leaves one version or another, in bytes.
const SECTOR: usize = device::sim::SECTOR;

/// Where an entry is: the number of a common directory, and a name in it.
pub(super) type Place = (usize, Vec<u8>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Dir,
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
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    pub first: usize,
    pub versions: Vec<Vec<u8>>,
    /// The newest version whose write has returned.
    pub written: usize,
}

impl History {
    pub fn number(&self) -> usize {
        self.first + self.versions.len() - 1
    }

    pub fn newest(&self) -> &Vec<u8> {
        self.versions.last().expect("a file has a version")
    }

    pub fn forget_before(&mut self, number: usize) {
        let drop = number
            .saturating_sub(self.first)
            .min(self.versions.len() - 1);
        self.versions.drain(..drop);
        self.first += drop;
    }

    pub fn allows(&self, found: &[u8]) -> Result<(), String> {
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
                let zero = sector.iter().all(|&b| b == 0);
                let sizes: Vec<usize> = sizes().collect();
                return Err(format!(
                    "sector {i} of {} bytes holds what was never written there (zeros: {zero}; \
                     sizes {sizes:?})",
                    found.len()
                ));
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
    /// The last operation on each inode.
    pub touched: BTreeMap<Ino, usize>,
    /// An operation was called and has not returned.
    pub pending: bool,
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

    pub fn durable(&mut self, operations: usize) {
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

    pub fn cover(&self, covered: Vec<Covered>) {
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

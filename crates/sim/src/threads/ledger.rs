//! What is known of each task's work: the entries after each of its operations, the versions of
//! its files, and how much of both is surely durable.

use crate::content::{SECTOR, Versions, explain};
use base::sched;
use base::sync::Mutex;
use fs::Ino;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
#[derive(Clone, Debug)]
pub(super) struct History {
    pub versions: Versions<Vec<u8>>,
    /// The newest version whose write has returned.
    pub written: usize,
}

impl History {
    pub fn new(bytes: Vec<u8>) -> History {
        History {
            versions: Versions::new(bytes),
            written: 0,
        }
    }

    pub fn newest(&self) -> &Vec<u8> {
        self.versions.last()
    }

    /// What a read may show that began when this was as in `before`, and ended now: the version
    /// of that moment, the one before it, whose write may have been under way, and all since.
    pub fn since(&self, before: &History) -> History {
        let mut shown = before.clone();
        shown
            .versions
            .forget_before(before.versions.number().saturating_sub(1));
        for newer in self.versions.from(before.versions.number() + 1) {
            shown.versions.push(newer.clone());
        }
        shown
    }

    pub fn allows(&self, found: &[u8]) -> Result<(), String> {
        let sizes = self.versions.iter().map(Vec::len);
        explain(found, sizes, |i, sector| {
            let at = i * SECTOR;
            let fits = |version: &Vec<u8>| {
                (0..sector.len()).all(|j| sector[j] == version.get(at + j).copied().unwrap_or(0))
            };
            self.versions.iter().any(fits)
        })
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
                    history.versions.forget_before(number);
                }
            }
        }
    }
}

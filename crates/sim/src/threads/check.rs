//! What is compared with the ledgers after a power cut.

use super::MARK;
use super::ledger::{Entries, Entry, History, Kind, Known, Ledger};
use super::rounds::Stop;
use crate::look::{content, list};
use base::sync::{Mutex, rank};
use fs::{FileSystem, Ino};
use std::sync::atomic::AtomicU64;

fn mark(fs: &FileSystem, ino: Ino) -> Result<Option<(usize, u32)>, fs::Error> {
    match fs.getxattr(ino, MARK) {
        Ok(value) => Ok(Some((value.len(), format::checksum(0, &value)))),
        Err(error) if error.errno() == libc::ENODATA => Ok(None),
        Err(error) => Err(error),
    }
}

/// The entries in the common directories, by the task whose they are.
fn look(fs: &FileSystem, dirs: &[Ino], tasks: usize) -> Result<Vec<Entries>, fs::Error> {
    let mut found = vec![Entries::new(); tasks];
    for (number, dir) in dirs.iter().enumerate() {
        for (name, _) in list(fs, *dir)? {
            let attr = fs.lookup(*dir, &name)?;
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
                mark: mark(fs, attr.ino)?,
            };
            found[owner].insert((number, name), entry);
        }
    }
    Ok(found)
}

/// Whether `found` is the newest state with what a create added that had not returned: when that was called.
fn with_created(ledger: &Ledger, found: &Entries) -> Option<u64> {
    let creating = ledger.creating.as_ref()?;
    let mut rest = found.clone();
    let entry = rest.remove(&creating.place)?;
    let is_fresh = !ledger.files.contains_key(&(entry.ino, entry.generation))
        && (entry.kind, entry.mark) == (creating.kind, None)
        && entry.mode == creating.kind.mode();
    (is_fresh && rest == *ledger.now()).then_some(creating.called)
}

/// Checks what a crash left and returns it as the new beginning; `None`: what files hold is
/// nobody's promise, since devices lied about the end of the journal.
pub(super) fn check(
    fs: &FileSystem,
    dirs: &[Ino],
    mut known: Known,
) -> Result<Option<Known>, Stop> {
    let found = look(fs, dirs, known.ledgers.len());
    let found = found.map_err(|error| Stop::noticed("looking", &error))?;
    let deceit = known.deceit.take();
    let shortened = deceit.as_ref().is_some_and(|deceit| {
        for ledger in &known.ledgers {
            ledger.lock().settle(|mark| deceit.is_firm(mark));
        }
        deceit.tail_may_be_missing()
    });
    let mut prefixes = Vec::new();
    for (task, (ledger, found)) in known.ledgers.iter().zip(&found).enumerate() {
        let ledger = ledger.lock();
        let last = ledger.states.len() - 1;
        if let Some(called) = with_created(&ledger, found) {
            prefixes.push((called, last));
            continue;
        }
        let fitting: Vec<usize> = (0..=last).filter(|i| ledger.states[*i] == *found).collect();
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
    let mut ledgers = Vec::new();
    for (entries, old) in found.into_iter().zip(std::mem::take(&mut known.ledgers)) {
        let old = old.into_inner();
        let mut ledger = Ledger::new(entries.clone());
        for entry in entries.values().filter(|e| e.kind == Kind::File) {
            let id = (entry.ino, entry.generation);
            let bytes = content(fs, entry.ino);
            let bytes = bytes.map_err(|error| Stop::noticed("reading", &error))?;
            let allowed = match old.files.get(&id) {
                Some(history) if history.unknown => Ok(()),
                Some(history) => history.allows(&bytes, deceit.as_deref()),
                // Created by a call that had not returned.
                None if bytes.is_empty() => Ok(()),
                None => Err("a file nobody wrote has bytes".to_owned()),
            };
            match allowed {
                // Its old blocks may have been written by others since.
                Err(_) if shortened => return Ok(None),
                Err(what) => return Err(Stop::Violation(format!("file {id:?}: {what}"))),
                Ok(()) => drop(ledger.files.insert(id, History::new(bytes))),
            }
        }
        ledgers.push(Mutex::new(rank::LEDGER, ledger));
    }
    Ok(Some(Known {
        moment: AtomicU64::new(0),
        syncing: AtomicU64::new(0),
        ledgers,
        ..known
    }))
}

//! Which files are in use, and by how many: their states by nid, opens, uses, and the kernel's references.
//!
//! Neighbouring nids are in one shard, side by side, as programs and write-back use them in their order (`base::map::NearMap`). When a state
//! leaves is invariant 6 of [`file`](super::file).
//!
//! Who only wants to know that a file has no state, as most have none that are looked at, finds that without the lock ([`present`](super::present)).
//!
//! Nobody gets a reference to a state but from who has one, or from its entry, under the shard's lock. So who has that lock, and a reference that is the
//! only one beside the entry's, has the state alone, and takes no lock of it ([`Counted::only_two`]).

use super::Files;
use super::file::FileState;
use super::meta::Meta;
use super::present::Present;
use super::references::{GROUP, References};
use crate::Ino;
use crate::content::FsNode;
use base::atomic::Ordering;
use base::counted::Counted;
use base::map::{HashSet, NearMap, shard_of, shards_for};
use base::spares::{Borrowed, Spares};
use base::sync::{Latch, rank};
use base::thread::lane;
use engine::Node;
use engine::cache::{FileKey, PageCache};
use engine::sum::{Padded, Sum};
use format::table::REGION_NIDS;
use std::collections::hash_map::{Entry as Place, OccupiedEntry};

/// Shards of the table for each of a few cores.
const SHARDS: usize = 16;
/// By how much the number of states may be wrong.
const STATES_SLACK: i64 = 1024;

/// How a file is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Usage {
    /// By an operation, which has a guard on its state.
    Operation,
    /// By a handle; `both`: one for reading and writing.
    Handle { both: bool },
}

#[derive(Debug, Default)]
struct Shard {
    entries: NearMap<Ino, Entry>,
    /// References by the kernel, which may know millions of inodes: kept apart, and small.
    lookups: References,
    /// Unlinked files that nobody refers to and that are being deleted, or were in part: they open
    /// no more, and no look-up refers to them.
    condemned: HashSet<FileKey>,
}

#[derive(Debug, Default)]
struct Entry {
    state: Option<Counted<FileState>>,
    opens: u32,
    /// Guards on the state.
    users: u32,
    /// Uses that began so far; tells whether the state was used between two looks.
    uses: u64,
}

impl Entry {
    fn unused(&self) -> bool {
        self.opens == 0 && self.users == 0
    }

    fn begin(&mut self, usage: Usage) {
        self.uses += 1;
        match usage {
            Usage::Operation => self.users += 1,
            Usage::Handle { .. } => self.opens += 1,
        }
    }

    fn end(&mut self, usage: Usage) {
        let count = match usage {
            Usage::Operation => &mut self.users,
            Usage::Handle { .. } => &mut self.opens,
        };
        *count = count.saturating_sub(1);
    }
}

/// Whether a use that has ended was the last open, and no kernel reference is left.
fn is_last(entry: &Entry, usage: Usage, lookups: &References, ino: Ino) -> bool {
    usage != Usage::Operation && entry.opens == 0 && !lookups.contains(ino)
}

/// Handles for reading and writing of a file begin or end, under its shard's lock.
fn count_both(state: &FileState, usage: Usage, change: impl FnOnce(u32) -> u32) {
    if usage == (Usage::Handle { both: true }) {
        let before = state.mappable.load(Ordering::Relaxed);
        state.mappable.store(change(before), Ordering::Relaxed);
    }
}

/// What `look` finds in the meta data of the state in an entry; the shard's lock is held, and `own` is the caller's reference, to the same state or to another.
/// `None`: somebody has it locked. Its lock comes before the table's: here it may be tried, and not waited for.
fn glance<R>(
    present: &mut Counted<FileState>,
    own: &mut Counted<FileState>,
    look: impl FnOnce(&Meta) -> R,
) -> Option<R> {
    match Counted::only_two(present, own) {
        Some(alone) => Some(look(alone.meta.alone())),
        None => present.meta.try_lock().map(|meta| look(&meta)),
    }
}

/// A shard, and what is seen of it without its lock.
#[derive(Debug)]
struct Part {
    shard: Latch<Shard>,
    present: Present,
}

/// All files in use.
#[derive(Debug)]
pub(crate) struct FileTable {
    parts: Box<[Padded<Part>]>,
    /// States in all shards; a rough figure.
    states: Sum,
    /// Programs begin most states, and write-back ends most of those of files that were written.
    spares: Spares<FileState>,
}

impl FileTable {
    /// A table for so many cores.
    pub fn new(cores: usize) -> Self {
        let part = |i| {
            Padded(Part {
                shard: Latch::keyed(rank::FILE_TABLE, i as u64, Shard::default()),
                present: Present::default(),
            })
        };
        FileTable {
            parts: (0..shards_for(cores, SHARDS)).map(part).collect(),
            states: Sum::new(cores, STATES_SLACK),
            spares: Spares::default(),
        }
    }

    /// States there are, give or take [`STATES_SLACK`].
    pub fn len(&self) -> usize {
        self.states.about().max(0) as usize
    }

    fn part(&self, ino: Ino) -> &Part {
        // Cores take nids along regions of their own.
        let number = shard_of(ino.0 / GROUP, REGION_NIDS / GROUP, self.parts.len());
        &self.parts[number]
    }

    fn shard(&self, ino: Ino) -> &Latch<Shard> {
        &self.part(ino).shard
    }

    /// A nid that had no state is about to have one in the table; its shard is locked.
    fn count(&self, ino: Ino) {
        self.part(ino).present.count(ino.0);
        self.states.add(lane(), 1);
    }

    /// The entry of a file that nobody uses goes, and its state if it has one; its shard is locked.
    fn take_out(&self, entry: OccupiedEntry<'_, Ino, Entry>) -> Option<Counted<FileState>> {
        let ino = *entry.key();
        let state = entry.remove().state?;
        self.part(ino).present.uncount(ino.0);
        self.states.add(lane(), -1);
        Some(state)
    }

    /// Whether a file may have a state. Nothing is locked.
    #[inline]
    pub(super) fn may_have(&self, ino: Ino) -> bool {
        self.part(ino).present.may_have(ino.0)
    }

    /// The same for who shows the inode, which `mark` notes, under its lock.
    #[inline]
    pub(super) fn may_have_after(&self, ino: Ino, mark: impl FnOnce()) -> bool {
        self.part(ino).present.may_have_after(ino.0, mark)
    }

    /// The state of a file if it has one.
    #[inline]
    pub(super) fn peek(&self, ino: Ino) -> Option<Counted<FileState>> {
        match self.may_have(ino) {
            true => self.shard(ino).lock().entries.get(&ino)?.state.clone(),
            false => None,
        }
    }

    /// Whether somebody has the file open for reading and writing.
    pub(super) fn has_both(&self, ino: Ino) -> bool {
        let shard = self.shard(ino).lock();
        let state = shard.entries.get(&ino).and_then(|e| e.state.as_ref());
        state.is_some_and(|state| state.mappable.load(Ordering::Relaxed) > 0)
    }

    /// Counts a use of a file and returns its state, and whether it was made now, as there was none; then `fill` says what is known of the file. The caller
    /// holds the inode's lock: nobody makes another one of it meanwhile.
    /// A state of an earlier use of the nid gives way. `None`: the file is condemned, and does
    /// not open, or it is gone, and the nid has a later use.
    pub(super) fn enter(
        &self,
        key: FileKey,
        usage: Usage,
        node: impl FnOnce() -> Node<FsNode>,
        fill: impl FnOnce(&mut Meta),
    ) -> Option<(Counted<FileState>, bool)> {
        // Goes after the shard's lock.
        let mut before = None;
        let mut guard = self.shard(key.nid).lock();
        let shard = &mut *guard;
        if usage != Usage::Operation && shard.condemned.contains(&key) {
            return None;
        }
        let entry = match shard.entries.entry(key.nid) {
            Place::Occupied(entry) => entry.into_mut(),
            Place::Vacant(place) => place.insert(Entry::default()),
        };
        let present = match &entry.state {
            Some(state) if state.key.generation > key.generation => return None,
            Some(state) if state.key == key => Some(Counted::clone(state)),
            _ => None,
        };
        entry.begin(usage);
        let is_new = present.is_none();
        let state = present.unwrap_or_else(|| {
            let mut state = self.spares.make(|| FileState::new(key, node()));
            if entry.state.is_none() {
                self.count(key.nid);
            }
            let alone = Counted::only(&mut state).expect("nobody else knows it yet");
            alone.meta.fill(fill);
            before = entry.state.replace(Counted::twin(&mut state));
            state
        });
        count_both(&state, usage, |handles| handles + 1);
        Some((state, is_new))
    }

    /// Counts a use of a file that has a state, and returns that.
    pub(super) fn enter_present(&self, ino: Ino) -> Option<Counted<FileState>> {
        if !self.may_have(ino) {
            return None;
        }
        let mut shard = self.shard(ino).lock();
        let entry = shard.entries.get_mut(&ino)?;
        let state = entry.state.clone()?;
        entry.begin(Usage::Operation);
        Some(state)
    }

    /// Ends a use. True when this was the last open and no kernel reference is left.
    pub(super) fn leave(
        &self,
        state: &mut Counted<FileState>,
        usage: Usage,
        pages: &PageCache,
    ) -> bool {
        let ino = state.ino();
        let (uses, last, present) = {
            let mut guard = self.shard(ino).lock();
            let shard = &mut *guard;
            let Place::Occupied(mut place) = shard.entries.entry(ino) else {
                return false;
            };
            let entry = place.get_mut();
            entry.end(usage);
            count_both(state, usage, |handles| handles.saturating_sub(1));
            let last = is_last(entry, usage, &shard.lookups, ino);
            if !entry.unused() {
                return last;
            }
            // Not always the caller's: that may have given way to one of a later use of the nid.
            let idle = match &mut entry.state {
                Some(present) => {
                    let key = present.key;
                    glance(present, state, |meta| meta.is_idle(key, pages))
                }
                None => Some(true),
            };
            match idle {
                Some(true) => {
                    let gone = self.take_out(place);
                    drop(guard);
                    if let Some(gone) = gone {
                        Counted::absorb(state, gone);
                    }
                    return last;
                }
                Some(false) => return last,
                None => (entry.uses, last, entry.state.clone()),
            }
        };
        let idle = |state: &Counted<FileState>| state.meta.lock().is_idle(state.key, pages);
        let idle = present.as_ref().is_none_or(idle);
        let mut guard = self.shard(ino).lock();
        let shard = &mut *guard;
        if let Place::Occupied(place) = shard.entries.entry(ino)
            && let entry = place.get()
            && entry.unused()
            && entry.uses == uses
            && entry.state.as_ref().map(Counted::as_ptr) == present.as_ref().map(Counted::as_ptr)
            && idle
        {
            self.take_out(place);
        }
        last
    }

    /// The same if it `may` be as the state's meta data are, in one step with that look. `None`: it may not, or somebody has them locked, and nothing was done.
    pub(super) fn leave_if(
        &self,
        state: &mut Counted<FileState>,
        usage: Usage,
        pages: &PageCache,
        may: impl FnOnce(&Meta) -> bool,
    ) -> Option<bool> {
        let (ino, key) = (state.ino(), state.key);
        let mut guard = self.shard(ino).lock();
        let shard = &mut *guard;
        let Place::Occupied(mut place) = shard.entries.entry(ino) else {
            return None;
        };
        let entry = place.get_mut();
        let present = (entry.state.as_mut()).filter(|present| Counted::ptr_eq(present, state))?;
        let idle = glance(present, state, |meta| {
            may(meta).then(|| meta.is_idle(key, pages))
        })??;
        entry.end(usage);
        count_both(state, usage, |handles| handles.saturating_sub(1));
        let last = is_last(entry, usage, &shard.lookups, ino);
        if entry.unused() && idle {
            let gone = self.take_out(place);
            drop(guard);
            if let Some(gone) = gone {
                Counted::absorb(state, gone);
            }
        }
        Some(last)
    }

    /// Whether a program or the kernel still refers to the inode.
    pub fn is_referenced(&self, ino: Ino) -> bool {
        let shard = self.shard(ino).lock();
        shard.lookups.contains(ino) || shard.entries.get(&ino).is_some_and(|e| e.opens > 0)
    }

    /// The same, or whether the file has a state.
    pub(super) fn is_active(&self, key: FileKey) -> bool {
        let shard = self.shard(key.nid).lock();
        let has_state = |e: &Entry| e.state.as_ref().is_some_and(|state| state.key == key);
        let entry = shard.entries.get(&key.nid);
        shard.lookups.contains(key.nid) || entry.is_some_and(|e| e.opens > 0 || has_state(e))
    }

    /// From now on a file does not open any more; false when somebody refers to it.
    pub(super) fn condemn(&self, key: FileKey) -> bool {
        let mut shard = self.shard(key.nid).lock();
        let open = shard.entries.get(&key.nid).is_some_and(|e| e.opens > 0);
        if open || shard.lookups.contains(key.nid) {
            return false;
        }
        shard.condemned.insert(key);
        true
    }

    /// The file is deleted.
    pub(super) fn pardon(&self, key: FileKey) {
        self.shard(key.nid).lock().condemned.remove(&key);
    }

    /// One more kernel reference.
    pub fn ref_inode(&self, ino: Ino) {
        self.shard(ino).lock().lookups.add(ino);
    }

    /// The same of what a look-up has found. False: it is condemned, and a reference would not keep its number.
    pub fn ref_found(&self, key: FileKey) -> bool {
        let mut shard = self.shard(key.nid).lock();
        let may_be = !shard.condemned.contains(&key);
        if may_be {
            shard.lookups.add(key.nid);
        }
        may_be
    }

    /// `count` kernel references fewer; true when nobody refers to the inode any more.
    pub fn forget(&self, ino: Ino, count: u64) -> bool {
        let mut shard = self.shard(ino).lock();
        shard.lookups.sub(ino, count) && shard.entries.get(&ino).is_none_or(|e| e.opens == 0)
    }

    /// Shows all states there are, one shard's after the other's, so that what is seen of them is at hand. Nothing is locked.
    pub fn each_state(&self, mut look: impl FnMut(&Counted<FileState>)) {
        let mut states = Vec::new();
        for part in &self.parts {
            let state = |entry: &Entry| entry.state.clone();
            states.extend(part.shard.lock().entries.values().filter_map(state));
            states.drain(..).for_each(|state| look(&state));
        }
    }

    /// The files that have a state.
    pub fn inos(&self) -> Vec<Ino> {
        let mut all = Vec::new();
        for part in &self.parts {
            let shard = part.shard.lock();
            let with_state = |(&ino, entry): (&Ino, &Entry)| entry.state.is_some().then_some(ino);
            all.extend(shard.entries.iter().filter_map(with_state));
        }
        all
    }

    /// Whether a program has the file open.
    pub fn is_open(&self, ino: Ino) -> bool {
        self.shard(ino)
            .lock()
            .entries
            .get(&ino)
            .is_some_and(|e| e.opens > 0)
    }
}

impl Drop for FileTable {
    /// Builds with debug assertions look whether what is seen without locks was what the table had.
    fn drop(&mut self) {
        if !cfg!(debug_assertions) || base::thread::panicking() {
            return;
        }
        for (i, part) in self.parts.iter().enumerate() {
            let shard = part.shard.lock();
            let with_state = (shard.entries.iter()).filter(|(_, entry)| entry.state.is_some());
            let agrees = part.present.agrees(with_state.map(|(ino, _)| ino.0));
            assert!(
                agrees,
                "states of part {i} are counted as {:?}",
                part.present
            );
        }
    }
}

/// A use of a file's state for the length of one operation.
#[derive(Debug)]
pub(crate) struct StateUse<'a> {
    files: &'a Files,
    /// Given back after the use is ended.
    state: Borrowed<'a, FileState>,
}

impl StateUse<'_> {
    pub(super) fn new(files: &Files, state: Counted<FileState>) -> StateUse<'_> {
        StateUse {
            files,
            state: Borrowed::new(&files.table.spares, state),
        }
    }
}

impl std::ops::Deref for StateUse<'_> {
    type Target = Counted<FileState>;
    fn deref(&self) -> &Counted<FileState> {
        &self.state
    }
}

impl Drop for StateUse<'_> {
    fn drop(&mut self) {
        let Files { table, pages, .. } = self.files;
        table.leave(&mut self.state, Usage::Operation, pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_refers_to_a_file_first_keeps_it_and_nobody_does_once_it_is_condemned() {
        let table = FileTable::new(1);
        let key = FileKey {
            nid: Ino { 0: 1000 },
            generation: 7,
        };
        assert!(table.ref_found(key) && !table.condemn(key));
        assert!(table.forget(key.nid, 1) && table.condemn(key));
        assert!(!table.ref_found(key) && !table.is_referenced(key.nid));
        // A later use of the number.
        assert!(table.ref_found(FileKey {
            generation: 8,
            ..key
        }));
        table.pardon(key);
        assert!(table.ref_found(key));
    }
}

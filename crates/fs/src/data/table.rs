//! Which files are in use, and by how many: their states by nid, opens, uses, and the kernel's references.
//!
//! Neighbouring nids are in one shard, side by side, as programs and write-back use them in their order (`base::map::NearMap`). When a state
//! leaves is invariant 6 of [`file`](super::file).

use super::Files;
use super::file::FileState;
use super::references::{GROUP, References};
use crate::Ino;
use crate::content::FsNode;
use base::map::{HashSet, NearMap, shard_of, shards_for};
use base::spares::{Borrowed, Spares};
use base::sync::{Arc, Mutex, rank};
use base::thread::lane;
use engine::Node;
use engine::cache::{FileKey, PageCache};
use engine::sum::{Padded, Sum};
use format::table::REGION_NIDS;

/// Shards of the table for each of a few cores.
const SHARDS: usize = 16;
/// By how much the number of states may be wrong.
const STATES_SLACK: i64 = 1024;

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
    state: Option<Arc<FileState>>,
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
}

/// All files in use.
#[derive(Debug)]
pub(crate) struct FileTable {
    shards: Box<[Padded<Mutex<Shard>>]>,
    /// States in all shards; a rough figure.
    states: Sum,
    /// Programs begin most states, and write-back ends most of those of files that were written.
    spares: Spares<FileState>,
}

impl FileTable {
    /// A table for so many cores.
    pub fn new(cores: usize) -> Self {
        let shard = |i| Padded(Mutex::keyed(rank::FILE_TABLE, i as u64, Shard::default()));
        FileTable {
            shards: (0..shards_for(cores, SHARDS)).map(shard).collect(),
            states: Sum::new(cores, STATES_SLACK),
            spares: Spares::default(),
        }
    }

    /// States there are, give or take [`STATES_SLACK`].
    pub fn len(&self) -> usize {
        self.states.about().max(0) as usize
    }

    fn shard(&self, ino: Ino) -> &Mutex<Shard> {
        // Cores take nids along regions of their own.
        let number = shard_of(ino.0 / GROUP, REGION_NIDS / GROUP, self.shards.len());
        &self.shards[number]
    }

    /// The state of a file if it has one.
    pub(super) fn peek(&self, ino: Ino) -> Option<Arc<FileState>> {
        self.shard(ino).lock().entries.get(&ino)?.state.clone()
    }

    /// Counts a use, or an open, of a file and returns its state, made if there is none.
    /// A state of an earlier use of the nid gives way. `None`: the file is condemned, and does
    /// not open, or it is gone, and the nid has a later use.
    pub(super) fn enter(
        &self,
        node: Node<FsNode>,
        generation: u64,
        open: bool,
    ) -> Option<Arc<FileState>> {
        let ino = node.nid();
        let key = FileKey {
            nid: ino,
            generation,
        };
        let mut shard = self.shard(ino).lock();
        if open && shard.condemned.contains(&key) {
            return None;
        }
        let newest = shard.entries.get(&ino).and_then(|e| e.state.as_ref());
        if newest.is_some_and(|state| state.key.generation > generation) {
            return None;
        }
        let entry = shard.entries.entry(ino).or_default();
        entry.uses += 1;
        if open {
            entry.opens += 1;
        } else {
            entry.users += 1;
        }
        match &entry.state {
            Some(state) if state.key == key => Some(Arc::clone(state)),
            _ => {
                let state = self.spares.make(|| FileState::new(key, node));
                if entry.state.replace(Arc::clone(&state)).is_none() {
                    self.states.add(lane(), 1);
                }
                Some(state)
            }
        }
    }

    /// Counts a use of a file that has a state, and returns that.
    pub(super) fn enter_present(&self, ino: Ino) -> Option<Arc<FileState>> {
        let mut shard = self.shard(ino).lock();
        let entry = shard.entries.get_mut(&ino)?;
        let state = entry.state.clone()?;
        entry.uses += 1;
        entry.users += 1;
        Some(state)
    }

    /// Ends a use or an open. True when this was the last open and no kernel reference is left.
    pub(super) fn leave(&self, state: &Arc<FileState>, open: bool, pages: &PageCache) -> bool {
        let ino = state.ino();
        let (uses, last, present) = {
            let mut guard = self.shard(ino).lock();
            let shard = &mut *guard;
            let Some(entry) = shard.entries.get_mut(&ino) else {
                return false;
            };
            if open {
                entry.opens = entry.opens.saturating_sub(1);
            } else {
                entry.users = entry.users.saturating_sub(1);
            }
            let last = open && entry.opens == 0 && !shard.lookups.contains(ino);
            if !entry.unused() {
                return last;
            }
            // Not always the caller's: that may have given way to one of a later use of the nid.
            let present = entry.state.as_ref();
            // Its lock comes before the table's: here it may be tried, and not waited for.
            match present.map(|s| s.meta.try_lock().map(|meta| meta.is_idle(s.key, pages))) {
                None | Some(Some(true)) => {
                    let gone = self.remove(shard, ino);
                    drop(guard);
                    drop(gone);
                    return last;
                }
                Some(Some(false)) => return last,
                Some(None) => (entry.uses, last, present.cloned()),
            }
        };
        let idle = |state: &Arc<FileState>| state.meta.lock().is_idle(state.key, pages);
        let idle = present.as_ref().is_none_or(idle);
        let mut shard = self.shard(ino).lock();
        if let Some(entry) = shard.entries.get_mut(&ino)
            && entry.unused()
            && entry.uses == uses
            && entry.state.as_ref().map(Arc::as_ptr) == present.as_ref().map(Arc::as_ptr)
            && idle
        {
            self.remove(&mut shard, ino);
        }
        last
    }

    fn remove(&self, shard: &mut Shard, ino: Ino) -> Option<Entry> {
        let entry = shard.entries.remove(&ino)?;
        if entry.state.is_some() {
            self.states.add(lane(), -1);
        }
        Some(entry)
    }

    /// Whether a program or the kernel still refers to the inode.
    pub fn is_referenced(&self, ino: Ino) -> bool {
        let shard = self.shard(ino).lock();
        shard.lookups.contains(ino) || shard.entries.get(&ino).is_some_and(|e| e.opens > 0)
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
    pub fn each_state(&self, mut look: impl FnMut(&Arc<FileState>)) {
        let mut states = Vec::new();
        for shard in &self.shards {
            let state = |entry: &Entry| entry.state.clone();
            states.extend(shard.lock().entries.values().filter_map(state));
            states.drain(..).for_each(|state| look(&state));
        }
    }

    /// The files that have a state.
    pub fn inos(&self) -> Vec<Ino> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
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

/// A use of a file's state for the length of one operation.
#[derive(Debug)]
pub(crate) struct StateUse<'a> {
    files: &'a Files,
    /// Given back after the use is ended.
    state: Borrowed<'a, FileState>,
}

impl StateUse<'_> {
    pub(super) fn new(files: &Files, state: Arc<FileState>) -> StateUse<'_> {
        StateUse {
            files,
            state: Borrowed::new(&files.table.spares, state),
        }
    }
}

impl std::ops::Deref for StateUse<'_> {
    type Target = Arc<FileState>;
    fn deref(&self) -> &Arc<FileState> {
        &self.state
    }
}

impl Drop for StateUse<'_> {
    fn drop(&mut self) {
        let Files { table, pages, .. } = self.files;
        table.leave(&self.state, false, pages);
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
